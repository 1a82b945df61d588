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
from ..format.records import Batches, EventEntry, Recording, walk
from .axis import Axis

MAX_POINTS = 2_000  # of a curve
EACH_BATCH = "train/loss of each batch"
MEASURED = ("log", "validation_end")
Moment = tuple[EventEntry, int, bool]


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


class _Logged:
    """The values of one metric, in 16 bytes each; where and when they were logged is looked up for what is drawn.

    Args:
        moments: the events that have values: each with the number of its attempt, and whether its work was lost.
        axis: of the page.
    """

    def __init__(self, moments: Sequence[Moment], axis: Axis) -> None:
        self._moments, self._axis = moments, axis
        self._rows, self._values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add the value of the latest moment."""
        self._rows.append(len(self._moments) - 1)
        self._values.append(value)

    def points(self) -> Iterator[Point]:
        """Yield them downsampled."""
        for at in _kept(np.frombuffer(self._values)):
            entry, attempt, is_lost = self._moments[self._rows[at]]
            time = self._axis.at(attempt, entry.clock)
            yield Point(entry.counters.steps, time, self._values[at], attempt, is_lost)


class _Losses:
    """The losses of all batches that were not skipped; where and when they were is looked up for what is drawn.

    Args:
        axis: of the page.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._blocks: list[tuple[Batches, int, bool]] = []
        self._ran: list[NDArray[np.int64] | None] = []  # the batches of each block that were not skipped; None for all
        self._values: list[NDArray[np.float64]] = []

    def __len__(self) -> int:
        return sum(map(len, self._values))

    def add(self, block: Batches, attempt: int, *, is_lost: bool) -> None:
        """Add the losses of a block that has them, of an attempt."""
        values, ran = np.asarray(block.losses, np.float64), None
        if block.skipped_batches[-1] != block.first.skipped_batches:
            skips = np.diff(np.asarray(block.skipped_batches), prepend=block.first.skipped_batches)
            ran = np.flatnonzero(skips == 0)
            values = values[ran]
        self._blocks.append((block, attempt, is_lost))
        self._ran.append(ran)
        self._values.append(values)

    def points(self) -> Iterator[Point]:
        """Yield them downsampled, timed by the run's clock."""
        values = np.concatenate(self._values)
        ends = np.cumsum([len(each) for each in self._values])
        for at in _kept(values):
            number = int(np.searchsorted(ends, at, side="right"))
            (block, attempt, is_lost), ran = self._blocks[number], self._ran[number]
            index = at - int(ends[number]) + len(self._values[number])
            index = index if ran is None else int(ran[index])
            since = (block.centiseconds[index] - block.centiseconds[-1]) / 100  # the last batch, in seconds
            time = self._axis.at(attempt, max(0.0, block.clock + since))
            yield Point(block.steps[index], time, float(values[at]), attempt, is_lost)


def charts(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, list[Curve]]:
    """Return the curves by what they measure: a metric's curves of training and validation share a chart."""
    series = _series(recording, attempts, axis)
    sets = {name for attempt in attempts for name in attempt.attempt.validation_sets}
    by_title: dict[str, list[Curve]] = {}
    for name in sorted(series, key=_rank):
        split, title = _parts(name, sets)
        found = series[name]
        by_title.setdefault(title, []).append(Curve(name, split, list(found.points()), len(found)))
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


def _series(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> Mapping[str, _Logged | _Losses]:
    moments: list[Moment] = []
    found: defaultdict[str, _Logged] = defaultdict(lambda: _Logged(moments, axis))
    losses = _Losses(axis)
    for index, entry, is_lost in walk(recording):
        attempt = attempts[index]
        if not attempt.is_fit:
            continue
        if isinstance(entry, EventEntry):
            if entry.event in MEASURED:
                moments.append((entry, attempt.number, is_lost))
                for name, value in entry.data["metrics"].items():
                    found[name].add(value)
        elif isinstance(entry, Batches) and entry.losses is not None:
            losses.add(entry, attempt.number, is_lost=is_lost)
    return {**found, **({EACH_BATCH: losses} if len(losses) else {})}


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
