"""Seeded faults at named events: the plugin `Chaos(faults)`, and `check_script`, which restarts a script after each."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
