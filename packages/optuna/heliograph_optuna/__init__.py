"""Optuna studies whose trials are Heliograph runs, and that can be resumed."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
