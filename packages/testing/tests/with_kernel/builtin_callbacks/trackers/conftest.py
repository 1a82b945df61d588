"""The fixtures of the kernel's tests."""

from heliograph.packages.trackers.tests.conftest import _without_settings, in_folder

__all__ = ["_without_settings", "in_folder"]
