"""The order of checkpoints by a metric."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isnan
from typing import Literal

from .manifest import Entry

Mode = Literal["min", "max"]


def best_first(values: Mapping[Entry, float | None], mode: Mode) -> list[Entry]:
    """Return checkpoints, the best first; NaN is the worst, and of equals the one that was written earlier is better.

    Args:
        values: the value of each; a checkpoint without one is left out.
        mode: whether smaller or larger is better.
    """
    sign = 1.0 if mode == "min" else -1.0
    scores = {entry: inf if isnan(value) else value * sign for entry, value in values.items() if value is not None}
    return sorted(scores, key=lambda entry: (scores[entry], *entry.order))
