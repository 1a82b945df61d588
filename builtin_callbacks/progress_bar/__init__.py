"""The progress of a run, as bars or as plain lines."""

from .plugin import ProgressBar as ProgressBar
