"""The fixtures of the kernel's tests."""

from heliograph.tests.builtin_callbacks.checkpoint.conftest import fit, names, old, opened, state

__all__ = ["fit", "names", "old", "opened", "state"]
