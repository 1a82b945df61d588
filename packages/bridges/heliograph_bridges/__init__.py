"""Bridges to Hugging Face, Lightning and Ignite in both directions, and `AccelerateEngine`."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
