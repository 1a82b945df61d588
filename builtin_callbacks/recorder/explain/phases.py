"""What a recorded run was doing, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..format.records import Batches, Entry, EventEntry
from .attempt_summary import AttemptSummary

Kind = Literal["starting", "training", "validation", "test", "prediction", "saving", "replaying"]
KINDS: tuple[Kind, ...] = ("training", "validation", "test", "prediction", "saving", "replaying", "starting")
BACKGROUND = ("checkpoint_saved", "resume_verified")  # a thread may emit them while the loop does something else
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
        """How long it took."""
        return self.end - self.begin


def phases(attempt: AttemptSummary) -> list[Slice]:
    """Return what an attempt did, without gaps, from its beginning to its end."""
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
    """Return the seconds of each kind that occurred."""
    sums = {kind: sum(piece.seconds for piece in slices if piece.kind == kind) for kind in KINDS}
    return {kind: seconds for kind, seconds in sums.items() if seconds > 0}


def longest(slices: Sequence[Slice], most: int = MAX_SLICES) -> list[Slice]:
    """Return at most `most` slices: if there are more, the longest kind of each stretch of them."""
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
    """Yield the time before each entry, with what the run did until then, and whether that was lost.

    Args:
        attempt: the attempt.
        entries: its entries, with whether the training later continued from before each.
    """
    kind: Kind = "starting"
    now: Kind
    then: Kind
    before, step, is_lost = 0.0, 0, False
    for entry, is_lost in entries:  # the last one says it of what follows
        if isinstance(entry, Batches):
            step, now, then = entry.steps[-1], "training", "training"
        elif isinstance(entry, EventEntry) and (entry.event not in BACKGROUND or kind == "saving"):
            step, now, then = entry.counters.steps, kind, _next(entry, kind, is_fit=attempt.is_fit)
        else:  # takes no time of the loop
            continue
        clock = max(before, entry.clock)
        yield Slice(now, attempt.number, before, clock, step), is_lost
        before, kind = clock, then
    yield Slice(kind, attempt.number, before, attempt.seconds, step), is_lost


def _next(entry: EventEntry, kind: Kind, *, is_fit: bool) -> Kind:
    """Return what the run does after an event."""
    rest: Kind = "training" if is_fit else "starting"
    kinds: dict[str, Kind] = {
        "epoch_start": "training",
        "validation_start": "validation",
        "validation_end": rest,
        "validation_cut": rest,
        "test_start": "test",
        "test_end": rest,
        "predict_start": "prediction",
        "predict_end": rest,
        "save_point": "saving",
        "checkpoint_saved": rest,
    }
    if entry.event == "replay":
        return "replaying" if entry.data["done"] < entry.data["batches"] else "training"
    return kinds.get(entry.event, "training" if kind == "saving" else kind)
