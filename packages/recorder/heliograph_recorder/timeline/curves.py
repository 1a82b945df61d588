"""The time axis of a page, and the downsampled curves of the metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..explain.attempt_summary import AttemptSummary
from ..format.records import Batches, EventEntry, Recording, walk

GAP = 0.015  # between two attempts, of the total
MAX_POINTS = 2_000  # of a curve
EACH_BATCH = "train/loss of each batch"
MEASURED = ("log", "validation_end")


class Axis:
    """The time axis: the attempts one after the other, with narrow gaps however long the real ones were.

    Attributes:
        gap: its width in seconds on the axis.
        starts: of each attempt.
        end: of the last attempt.
    """

    def __init__(self, attempts: Sequence[AttemptSummary]) -> None:
        total = sum(attempt.seconds for attempt in attempts)
        self.gap = GAP * total if len(attempts) > 1 else 0.0
        self.starts = list(accumulate((attempt.seconds + self.gap for attempt in attempts[:-1]), initial=0.0))
        self.end = self.starts[-1] + attempts[-1].seconds

    def at(self, attempt: int, clock: float) -> float:
        """Convert the seconds since an attempt began to the axis; attempts are numbered from 1."""
        return round(self.starts[attempt - 1] + clock, 6)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric.

    Attributes:
        step: optimizer steps.
        time: in seconds on the time axis.
        value: may be NaN or infinite.
        attempt: its number.
        is_lost: discarded by a later resume or roll-back.
    """

    step: int
    time: float
    value: float
    attempt: int
    is_lost: bool


@dataclass(slots=True)
class Curve:
    """The values of one metric.

    Attributes:
        metric: its name.
        split: such as `train`, or `validation` with the name of the data set.
        points: at most about 2,000.
        total: the number of values before downsampling.
    """

    metric: str
    split: str
    points: list[Point] = field(default_factory=list)
    total: int = 0


class _BatchLosses:
    """The losses of the batches that ran, as columns: steps, times, losses, attempts, and which are lost."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._blocks: list[tuple[NDArray[Any], ...]] = []

    def __len__(self) -> int:
        return sum(len(block[0]) for block in self._blocks)

    def add(self, block: Batches, attempt: int, *, is_lost: bool) -> None:
        ran = np.diff(np.asarray(block.skipped_batches), prepend=block.first.skipped_batches) == 0
        before_last = (np.asarray(block.centiseconds) - block.centiseconds[-1]) / 100
        times = self._axis.starts[attempt - 1] + np.maximum(0.0, block.clock + before_last)
        columns = np.asarray(block.steps), times, np.asarray(block.losses)
        count = int(ran.sum())
        rest = np.full(count, attempt, np.int32), np.full(count, is_lost)
        self._blocks.append((*(column[ran] for column in columns), *rest))

    def points(self) -> Iterator[Point]:
        columns = [np.concatenate(column) for column in zip(*self._blocks, strict=True)]
        for at in _downsampled_positions(columns[2]):
            step, time, value, attempt, is_lost = (column[at].item() for column in columns)
            yield Point(step, round(time, 6), value, attempt, is_lost)


def charts(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, list[Curve]]:
    """Return the curves by chart: training and validation of a metric share one."""
    series = _series(recording, attempts, axis)
    sets = {name for attempt in attempts for name in attempt.attempt.validation_sets}
    by_title: dict[str, list[Curve]] = {}
    for name in sorted(series, key=_rank):
        split, title = _parts(name, sets)
        by_title.setdefault(title, []).append(Curve(name, split, *series[name]))
    return dict(sorted(by_title.items(), key=lambda item: (item[0] != "loss", len(item[1]) < 2, item[0])))


def downsampled(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` points: the first, last, lowest, highest of each stretch, some not finite."""
    return [points[at] for at in _downsampled_positions(np.array([point.value for point in points]), most)]


def pieces(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Split a curve by attempt, and into lost and other points."""
    for _, piece in groupby(points, lambda point: (point.attempt, point.is_lost)):
        yield list(piece)


def _downsampled_positions(values: NDArray[np.float64], most: int = MAX_POINTS) -> Iterable[int]:
    if len(values) <= most:
        return range(len(values))
    size = math.ceil(4 * len(values) / most)
    return (start + at for start in range(0, len(values), size) for at in _extremes(values[start : start + size]))


def _extremes(stretch: NDArray[np.float64]) -> list[int]:
    positions, finite = {0, len(stretch) - 1}, np.isfinite(stretch)
    if finite.any():
        positions.add(int(np.where(finite, stretch, math.inf).argmin()))
        positions.add(int(np.where(finite, stretch, -math.inf).argmax()))
    if not finite.all():
        positions.update((~finite).nonzero()[0][: max(0, 4 - len(positions))].tolist())
    return sorted(positions)


def _series(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, tuple[list[Point], int]]:
    """Return the downsampled points of each metric, and the number of its values."""
    logged: defaultdict[str, list[Point]] = defaultdict(list)
    losses = _BatchLosses(axis)
    for index, entry, is_lost in walk(recording):
        attempt = attempts[index]
        if not attempt.is_fit:
            continue
        if isinstance(entry, EventEntry):
            if entry.event in MEASURED:
                step, time = entry.counters.steps, axis.at(attempt.number, entry.clock)
                for name, value in entry.data["metrics"].items():
                    logged[name].append(Point(step, time, value, attempt.number, is_lost))
        elif isinstance(entry, Batches) and entry.losses is not None:
            losses.add(entry, attempt.number, is_lost=is_lost)
    series = {name: (downsampled(points), len(points)) for name, points in logged.items()}
    return series | ({EACH_BATCH: (list(losses.points()), len(losses))} if len(losses) else {})


def _parts(name: str, sets: Iterable[str]) -> tuple[str, str]:
    """Return the split and the chart of a metric."""
    if name == EACH_BATCH:
        return "each batch", "loss"
    split, _, tail = name.partition("/")
    dataset, _, metric = tail.partition("/")
    if metric and dataset in sets:
        return f"{split}/{dataset}", metric
    return (split, tail) if tail else ("", name)


def _rank(name: str) -> tuple[int, str]:
    return {EACH_BATCH: 0, "train": 1, "validation": 2}.get(name if name == EACH_BATCH else name.split("/")[0], 3), name
