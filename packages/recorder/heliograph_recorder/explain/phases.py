"""What a recorded run was doing, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..format.records import Batches, Entry, EventEntry
from .attempt_summary import AttemptSummary

Kind = Literal["starting", "training", "validation", "test", "prediction", "saving", "replaying"]
KINDS: tuple[Kind, ...] = ("training", "validation", "test", "prediction", "saving", "replaying", "starting")
BACKGROUND = ("checkpoint_saved", "resume_verified")  # a thread may emit them while the loop does something else
TRAINING: Kind = "training"
ENDS = ("validation_end", "validation_cut", "test_end", "predict_end", "checkpoint_saved")
NEXT: Mapping[str, Kind] = {
    "epoch_start": "training",
    "validation_start": "validation",
    "test_start": "test",
    "predict_start": "prediction",
    "save_point": "saving",
}  # what the run does after an event
MAX_SLICES = 1_500  # as many as a page can show


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time in which the run did one thing.

    Attributes:
        kind: what it did.
        attempt: its number.
        begin, end: in seconds since the attempt began.
        step: optimizer steps at its end.
    """

    kind: Kind
    attempt: int
    begin: float
    end: float
    step: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def phases(attempt: AttemptSummary) -> list[Slice]:
    slices: list[Slice] = []
    for piece, _ in pieces(attempt, ((entry, False) for entry in attempt.attempt.entries)):
        if piece.end <= piece.begin:
            continue
        if slices and slices[-1].kind == piece.kind:
            slices[-1] = replace(slices[-1], end=piece.end, step=piece.step)
        else:
            slices.append(piece)
    return slices


def totals(slices: Sequence[Slice]) -> dict[Kind, float]:
    sums = {kind: sum(piece.seconds for piece in slices if piece.kind == kind) for kind in KINDS}
    return {kind: seconds for kind, seconds in sums.items() if seconds > 0}


def longest(slices: Sequence[Slice], most: int = MAX_SLICES) -> list[Slice]:
    if len(slices) <= most:
        return list(slices)
    size = -(-len(slices) // most)
    kept: list[Slice] = []
    for start in range(0, len(slices), size):
        stretch = slices[start : start + size]
        sums = totals(stretch)
        for attempt in dict.fromkeys(piece.attempt for piece in stretch):
            own = [piece for piece in stretch if piece.attempt == attempt]
            kept.append(replace(own[-1], kind=max(sums, key=lambda kind: sums[kind]), begin=own[0].begin))
    return kept


def pieces(attempt: AttemptSummary, entries: Iterable[tuple[Entry, bool]]) -> Iterator[tuple[Slice, bool]]:
    kind: Kind = "starting"  # since the last entry
    open_kind, open_lost = kind, False  # of the slice that is not yielded yet
    begin, end, step, is_lost = 0.0, 0.0, 0, False
    is_fit, number = attempt.is_fit, attempt.number
    for entry, is_lost in entries:  # the last one says it of what follows
        if isinstance(entry, Batches):
            at, now, then = entry.steps[-1], TRAINING, TRAINING
        elif isinstance(entry, EventEntry) and (entry.event not in BACKGROUND or kind == "saving"):
            at, now, then = entry.counters.steps, kind, _next(entry, kind, is_fit=is_fit)
        else:  # takes no time of the loop
            continue
        if now != open_kind or is_lost != open_lost:
            yield Slice(open_kind, number, begin, end, step), open_lost
            open_kind, open_lost, begin = now, is_lost, end
        kind = then
        if entry.clock > end:
            end, step = entry.clock, at
    if kind != open_kind or is_lost != open_lost:
        yield Slice(open_kind, number, begin, end, step), open_lost
        open_kind, open_lost, begin = kind, is_lost, end
    yield Slice(open_kind, number, begin, attempt.seconds, step), open_lost


def _next(entry: EventEntry, kind: Kind, *, is_fit: bool) -> Kind:
    event = entry.event
    if event == "replay":
        return "replaying" if entry.data["done"] < entry.data["batches"] else "training"
    if event in ENDS:
        return "training" if is_fit else "starting"
    return NEXT.get(event) or ("training" if kind == "saving" else kind)
