"""Recorded runs done again: up to a step, with one thing changed, operator by operator."""
