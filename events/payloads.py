"""Events that show more than numbers: `run.log_image` and the like emit them, and every tracker writes what it can.

Their `title` is the `name` of these calls: the `name` of an event is that of its kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .catalogue import Event


class LogImage(Event):
    """An image to show: a NumPy array of bytes, `uint8` of shape (height, width, 3)."""

    title: str
    image: Any


class LogText(Event):
    """A text to show; trackers that know Markdown read it as such."""

    title: str
    text: str


class LogHistogram(Event):
    """Values whose distribution is to be shown: a NumPy array of one dimension."""

    title: str
    values: Any


class LogCurve(Event):
    """A precision-recall curve to show: of each sample whether it is positive, and its score from 0 to 1."""

    title: str
    labels: Any
    scores: Any


class LogFile(Event):
    """A file to keep with the run; it is read soon after, in another thread."""

    title: str
    path: Path
