"""Errors of the framework's own."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run failed with an exception that is on no pass-through list; the original is its `__cause__`."""
