"""Checks for your tests: `check_plugin(lambda: MyPlugin(...))` and `assert_resume_exact(make_trainer)`."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
