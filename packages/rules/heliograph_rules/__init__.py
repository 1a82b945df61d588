"""Rules: steer a run by a file instead of code."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
