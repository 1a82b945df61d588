"""The fixtures of the kernel's tests."""

from heliograph.tests.core.data.conftest import (
    _global_generators,
    collate,
    drawing,
    fit,
    flowing,
    noisy,
    read,
    reading,
    sized_flowing,
    training_stream,
)

__all__ = [
    "_global_generators",
    "collate",
    "drawing",
    "fit",
    "flowing",
    "noisy",
    "read",
    "reading",
    "sized_flowing",
    "training_stream",
]
