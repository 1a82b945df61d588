"""Lightning: callbacks as plugins, and plugins in its Trainer."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
