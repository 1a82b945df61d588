"""Trackers: CSV files, MLflow, Weights & Biases, Trackio, OpenTelemetry, and traces of torch's profiler."""

from heliograph.spi import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
