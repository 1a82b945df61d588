"""Other frameworks' callbacks here, our plugins in their loops, and `AccelerateEngine`."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
