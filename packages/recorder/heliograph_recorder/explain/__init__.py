"""Explain a recorded run."""
