"""Explain a recorded run in words."""
