"""The fixtures of the kernel's tests."""

from heliograph.tests.core.checkpoint.conftest import names, old, older, opened, state

__all__ = ["names", "old", "older", "opened", "state"]
