"""Plugins in the training loop of another framework."""
