"""Checks for your tests: `check_plugin`, `check_tracker`, `check_resume`, `assert_resume_exact`, `check_golden`."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
