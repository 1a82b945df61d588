"""Heliograph on Ray: a launcher for clusters, search with Tune, data from Ray Data."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
