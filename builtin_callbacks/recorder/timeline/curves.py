"""The curves of a recorded run's metrics, thinned out so that they can be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..explain.attempt_summary import Leg
from ..format.records import Batches, EventEntry, Recording
from ..format.walk import walk
from .axis import Axis

MOST_POINTS = 2_000  # of a curve
EACH_BATCH = "train/loss of each batch"


@dataclass(frozen=True, slots=True)
class Point:
    """One reading of a metric.

    Attributes:
        step: optimizer steps behind it.
        time: its place on the time axis.
        value: may be no finite number.
        leg: the number of its attempt.
        is_lost: whether the run went back behind it later.
    """

    step: int
    time: float
    value: float
    leg: int
    is_lost: bool


@dataclass(slots=True)
class Curve:
    """The readings of one metric in the order in which they came.

    Attributes:
        metric: its name.
        split: what it was measured on, such as `train`, or `validation` with the name of the set.
        points: thinned out to about 2,000.
        total: how many there were.
    """

    metric: str
    split: str
    points: list[Point] = field(default_factory=list)
    total: int = 0


def charts(recording: Recording, found: Sequence[Leg], axis: Axis) -> dict[str, list[Curve]]:
    """Return the curves by what they measure: the same metric of the training and of the validation go together."""
    points: dict[str, list[Point]] = {}
    sets = {name for leg in found for name in leg.attempt.validation_sets}
    for name, point in _readings(recording, found, axis):
        points.setdefault(name, []).append(point)
    drawn: dict[str, list[Curve]] = {}
    for name in sorted(points, key=_rank):
        split, title = _parts(name, sets)
        drawn.setdefault(title, []).append(Curve(name, split, thinned(points[name]), len(points[name])))
    return dict(sorted(drawn.items(), key=lambda item: (item[0] != "loss", len(item[1]) < 2, item[0])))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many points, and the first, the last, the lowest and the highest of each stretch of them.

    Points that are no finite number stay as well, as far as there is room for them.
    """
    if len(points) <= most:
        return list(points)
    size = math.ceil(4 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        kept += _extremes(points[start : start + size])
    return kept


def pieces(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the points of a curve that belong together: those of one attempt, lost or not."""
    for _, piece in groupby(points, lambda point: (point.leg, point.is_lost)):
        yield list(piece)


def _extremes(stretch: Sequence[Point]) -> list[Point]:
    finite = [index for index, point in enumerate(stretch) if math.isfinite(point.value)]
    kept = {0, len(stretch) - 1}
    if finite:
        kept.add(min(finite, key=lambda index: stretch[index].value))
        kept.add(max(finite, key=lambda index: stretch[index].value))
    broken = [index for index, point in enumerate(stretch) if not math.isfinite(point.value)]
    kept.update(broken[: max(0, 4 - len(kept))])
    return [stretch[index] for index in sorted(kept)]


def _readings(recording: Recording, found: Sequence[Leg], axis: Axis) -> Iterator[tuple[str, Point]]:
    for index, entry, is_lost in walk(recording):
        leg = found[index]
        if not leg.is_fit:
            continue
        if isinstance(entry, EventEntry) and entry.event in ("log", "validation_end"):
            time = axis.at(leg.number, entry.clock)
            metrics: Mapping[str, float] = entry.data["metrics"]
            for name, value in metrics.items():
                yield name, Point(entry.counters.steps, time, value, leg.number, is_lost)
        elif isinstance(entry, Batches) and entry.losses is not None:
            yield from _losses(entry, leg, axis, is_lost=is_lost)


def _losses(entry: Batches, leg: Leg, axis: Axis, *, is_lost: bool) -> Iterator[tuple[str, Point]]:
    """Yield the loss of every batch but those left out; the run's clock tells how long before the last each was."""
    left_out = entry.first.skipped_batches
    for batch in entry:
        before, left_out = left_out, batch.counters.skipped_batches
        if batch.loss is not None and left_out == before:
            clock = max(0.0, entry.clock - (entry.centiseconds[-1] / 100 - batch.counters.seconds))
            time = axis.at(leg.number, clock)
            yield EACH_BATCH, Point(batch.counters.steps, time, batch.loss, leg.number, is_lost)


def _parts(name: str, sets: Iterable[str]) -> tuple[str, str]:
    """Return what a metric was measured on, and what it measures."""
    if name == EACH_BATCH:
        return "each batch", "loss"
    split, _, rest = name.partition("/")
    dataset, _, metric = rest.partition("/")
    if metric and dataset in sets:
        return f"{split}/{dataset}", metric
    return (split, rest) if rest else ("", name)


def _rank(name: str) -> tuple[int, str]:
    return {EACH_BATCH: 0, "train": 1, "validation": 2}.get(name if name == EACH_BATCH else name.split("/")[0], 3), name
