"""The fixtures of the kernel's tests."""

from heliograph.tests.builtin_callbacks.conftest import (
    _global_generators,
    batches,
    losses,
    scripted,
    sgd,
    task,
    weights,
)

__all__ = ["_global_generators", "batches", "losses", "scripted", "sgd", "task", "weights"]
