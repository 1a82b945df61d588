"""The curves of a recorded run's metrics, downsampled to what can be drawn."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..explain.attempt_summary import AttemptSummary
from ..format.records import Batches, EventEntry, Recording
from ..format.walk import walk
from .axis import Axis

MAX_POINTS = 2_000  # of a curve
EACH_BATCH = "train/loss of each batch"


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric.

    Attributes:
        step: optimizer steps done.
        time: in seconds on the time axis.
        value: may be NaN or infinite.
        attempt: the number of its attempt.
        is_lost: whether the run later continued from before it.
    """

    step: int
    time: float
    value: float
    attempt: int
    is_lost: bool


@dataclass(slots=True)
class Curve:
    """The values of one metric, in order.

    Attributes:
        metric: its name.
        split: what it was measured on, such as `train`, or `validation` with the name of the set.
        points: downsampled to about 2,000.
        total: how many there were.
    """

    metric: str
    split: str
    points: list[Point] = field(default_factory=list)
    total: int = 0


class _Series:
    """All values of one metric, in 32 bytes each: there may be one for every batch."""

    def __init__(self) -> None:
        self.steps, self.places = array("q"), array("q")  # a place is twice the attempt's number, plus 1 for lost work
        self.times, self.values = array("d"), array("d")

    def add(self, step: int, time: float, value: float, place: int) -> None:
        """Add one."""
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        self.places.append(place)

    def extend(
        self, steps: NDArray[np.int64], times: NDArray[np.float64], values: NDArray[np.float64], place: int
    ) -> None:
        """Add several, all of one place."""
        self.steps.frombytes(steps.tobytes())
        self.times.frombytes(times.tobytes())
        self.values.frombytes(values.tobytes())
        self.places.frombytes(np.full(len(steps), place, np.int64).tobytes())

    def points(self) -> list[Point]:
        """Return them downsampled."""
        return [
            Point(self.steps[at], self.times[at], self.values[at], self.places[at] // 2, self.places[at] % 2 == 1)
            for at in _kept(np.frombuffer(self.values))
        ]


def charts(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, list[Curve]]:
    """Return the curves by what they measure: a metric's curves of training and validation share a chart."""
    series = _series(recording, attempts, axis)
    sets = {name for attempt in attempts for name in attempt.attempt.validation_sets}
    by_title: dict[str, list[Curve]] = {}
    for name in sorted(series, key=_rank):
        split, title = _parts(name, sets)
        found = series[name]
        by_title.setdefault(title, []).append(Curve(name, split, found.points(), len(found.steps)))
    return dict(sorted(by_title.items(), key=lambda item: (item[0] != "loss", len(item[1]) < 2, item[0])))


def downsampled(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` points: the first, the last, the lowest and the highest of each stretch of them.

    NaN and infinite values are kept as well, as far as there is room.
    """
    return [points[at] for at in _kept(np.array([point.value for point in points]), most)]


def pieces(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the pieces of a curve: the points of one attempt, lost ones apart."""
    for _, piece in groupby(points, lambda point: (point.attempt, point.is_lost)):
        yield list(piece)


def _kept(values: NDArray[np.float64], most: int = MAX_POINTS) -> Iterable[int]:
    """Return the positions of the values that are drawn."""
    if len(values) <= most:
        return range(len(values))
    size = math.ceil(4 * len(values) / most)
    return (start + at for start in range(0, len(values), size) for at in _extremes(values[start : start + size]))


def _extremes(stretch: NDArray[np.float64]) -> list[int]:
    kept, finite = {0, len(stretch) - 1}, np.isfinite(stretch)
    if finite.any():
        kept.add(int(np.where(finite, stretch, math.inf).argmin()))
        kept.add(int(np.where(finite, stretch, -math.inf).argmax()))
    if not finite.all():
        kept.update((~finite).nonzero()[0][: max(0, 4 - len(kept))].tolist())
    return sorted(kept)


def _series(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, _Series]:
    found: defaultdict[str, _Series] = defaultdict(_Series)
    for index, entry, is_lost in walk(recording):
        attempt = attempts[index]
        place = 2 * attempt.number + is_lost
        if not attempt.is_fit:
            continue
        if isinstance(entry, EventEntry) and entry.event in ("log", "validation_end"):
            time = axis.at(attempt.number, entry.clock)
            metrics: Mapping[str, float] = entry.data["metrics"]
            for name, value in metrics.items():
                found[name].add(entry.counters.steps, time, value, place)
        elif isinstance(entry, Batches) and entry.losses is not None:
            _add_losses(found[EACH_BATCH], entry, axis.at(attempt.number, 0.0), place)
    return {name: each for name, each in found.items() if each.steps}


def _add_losses(series: _Series, block: Batches, start: float, place: int) -> None:
    """Add the loss of every batch that was not skipped, timed by the run's clock."""
    skips = np.diff(np.asarray(block.skipped_batches), prepend=block.first.skipped_batches)
    ran = skips == 0
    since = (np.asarray(block.centiseconds) - block.centiseconds[-1]) / 100  # the last batch, in seconds
    times = (start + np.maximum(0.0, block.clock + since)).round(6)
    series.extend(np.asarray(block.steps, np.int64)[ran], times[ran], np.asarray(block.losses, np.float64)[ran], place)


def _parts(name: str, sets: Iterable[str]) -> tuple[str, str]:
    """Return the split of a metric, with its set if there are several, and the name of what it measures."""
    if name == EACH_BATCH:
        return "each batch", "loss"
    split, _, rest = name.partition("/")
    dataset, _, metric = rest.partition("/")
    if metric and dataset in sets:
        return f"{split}/{dataset}", metric
    return (split, rest) if rest else ("", name)


def _rank(name: str) -> tuple[int, str]:
    return {EACH_BATCH: 0, "train": 1, "validation": 2}.get(name if name == EACH_BATCH else name.split("/")[0], 3), name
