"""Engines of several processes, or of several GPUs, each with the complete model."""
