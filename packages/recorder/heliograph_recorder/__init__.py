"""`Recorder`, and what reads its recordings: explain, replay, timeline."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
