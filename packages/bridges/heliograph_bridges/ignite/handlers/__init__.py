"""Handlers of PyTorch-Ignite as plugins."""
