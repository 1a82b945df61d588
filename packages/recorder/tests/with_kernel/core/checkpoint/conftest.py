"""The fixtures of the kernel's tests."""

from heliograph.tests.core.checkpoint.conftest import names, old, opened, state

__all__ = ["names", "old", "opened", "state"]
