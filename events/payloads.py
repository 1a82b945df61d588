"""Events for images, texts, histograms, curves and files, emitted by `run.log_image` and similar methods.

Every tracker writes the kinds that it supports. The field is called `title`, because `name` is the name of the event.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .catalogue import Event


class LogImage(Event):
    """An image: a `uint8` NumPy array of shape (height, width, 3)."""

    title: str
    image: Any


class LogText(Event):
    """A text. Trackers that support Markdown render it."""

    title: str
    text: str


class LogHistogram(Event):
    """Values for a histogram: a one-dimensional NumPy array."""

    title: str
    values: Any


class LogCurve(Event):
    """A precision-recall curve: labels (0 or 1) and scores (0 to 1) of samples."""

    title: str
    labels: Any
    scores: Any


class LogFile(Event):
    """A file to store with the run. It is read a little later, in another thread."""

    title: str
    path: Path
