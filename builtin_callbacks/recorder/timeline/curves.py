"""The curves of a recorded run's metrics, downsampled to what can be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

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


def charts(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> dict[str, list[Curve]]:
    """Return the curves by what they measure: a metric's curves of training and validation share a chart."""
    points: dict[str, list[Point]] = {}
    sets = {name for attempt in attempts for name in attempt.attempt.validation_sets}
    for name, point in _points(recording, attempts, axis):
        points.setdefault(name, []).append(point)
    by_title: dict[str, list[Curve]] = {}
    for name in sorted(points, key=_rank):
        split, title = _parts(name, sets)
        by_title.setdefault(title, []).append(Curve(name, split, downsampled(points[name]), len(points[name])))
    return dict(sorted(by_title.items(), key=lambda item: (item[0] != "loss", len(item[1]) < 2, item[0])))


def downsampled(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most `most` points: the first, the last, the lowest and the highest of each stretch of them.

    NaN and infinite values are kept as well, as far as there is room.
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(4 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        kept += _extremes(points[start : start + size])
    return kept


def pieces(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the pieces of a curve: the points of one attempt, lost ones apart."""
    for _, piece in groupby(points, lambda point: (point.attempt, point.is_lost)):
        yield list(piece)


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    finite = [index for index, point in enumerate(stretch) if math.isfinite(point.value)]
    kept = {0, len(stretch) - 1}
    if finite:
        kept.add(min(finite, key=lambda index: stretch[index].value))
        kept.add(max(finite, key=lambda index: stretch[index].value))
    infinite = [index for index, point in enumerate(stretch) if not math.isfinite(point.value)]
    kept.update(infinite[: max(0, 4 - len(kept))])
    return [stretch[index] for index in sorted(kept)]


def _points(recording: Recording, attempts: Sequence[AttemptSummary], axis: Axis) -> Iterator[tuple[str, Point]]:
    for index, entry, is_lost in walk(recording):
        attempt = attempts[index]
        if not attempt.is_fit:
            continue
        if isinstance(entry, EventEntry) and entry.event in ("log", "validation_end"):
            time = axis.at(attempt.number, entry.clock)
            metrics: Mapping[str, float] = entry.data["metrics"]
            for name, value in metrics.items():
                yield name, Point(entry.counters.steps, time, value, attempt.number, is_lost)
        elif isinstance(entry, Batches) and entry.losses is not None:
            yield from _losses(entry, attempt, axis, is_lost=is_lost)


def _losses(entry: Batches, attempt: AttemptSummary, axis: Axis, *, is_lost: bool) -> Iterator[tuple[str, Point]]:
    """Yield the loss of every batch that was not skipped, timed by the run's clock."""
    skipped = entry.first.skipped_batches
    for batch in entry:
        before, skipped = skipped, batch.counters.skipped_batches
        if batch.loss is not None and skipped == before:
            clock = max(0.0, entry.clock - (entry.centiseconds[-1] / 100 - batch.counters.seconds))
            time = axis.at(attempt.number, clock)
            yield EACH_BATCH, Point(batch.counters.steps, time, batch.loss, attempt.number, is_lost)


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
