"""Checkpoints in Ray's storage."""
