"""Optimizers, schedulers and accumulation windows."""
