"""Evaluations of checkpoints in another process, and a plugin that reads their results."""
