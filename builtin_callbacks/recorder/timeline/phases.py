"""What a recorded run was doing at every moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..explain.attempt_summary import Leg
from ..format.records import Batches, EventEntry

Kind = Literal["starting", "training", "validation", "test", "saving", "replaying"]
KINDS: tuple[Kind, ...] = ("training", "validation", "test", "saving", "replaying", "starting")
BESIDE = ("checkpoint_saved", "resume_verified")  # come amid whatever the run does
MOST_SLICES = 1_500  # that can be told apart on a page


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time in which the run did one thing.

    Attributes:
        kind: what it did.
        leg: the number of the attempt.
        begin: in seconds since the attempt began.
        end: the same.
        step: optimizer steps at its end.
    """

    kind: Kind
    leg: int
    begin: float
    end: float
    step: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


def phases(leg: Leg) -> list[Slice]:
    """Return what an attempt did, without gaps, from its beginning to its end."""
    found: list[Slice] = []
    for piece in _changes(leg):
        if piece.end <= piece.begin:
            continue
        if found and found[-1].kind == piece.kind:
            found[-1] = replace(found[-1], end=piece.end, step=piece.step)
        else:
            found.append(piece)
    return found


def totals(found: Sequence[Slice]) -> dict[Kind, float]:
    """Return the seconds of each kind, those that came up only."""
    sums = {kind: sum(piece.seconds for piece in found if piece.kind == kind) for kind in KINDS}
    return {kind: seconds for kind, seconds in sums.items() if seconds > 0}


def thinned(found: Sequence[Slice], most: int = MOST_SLICES) -> list[Slice]:
    """Return at most so many slices: where there are more, each of them is what took longest in its stretch."""
    if len(found) <= most:
        return list(found)
    size = -(-len(found) // most)
    kept: list[Slice] = []
    for start in range(0, len(found), size):
        stretch = found[start : start + size]
        sums = totals(stretch)
        for leg in dict.fromkeys(piece.leg for piece in stretch):
            own = [piece for piece in stretch if piece.leg == leg]
            kept.append(replace(own[-1], kind=max(sums, key=lambda kind: sums[kind]), begin=own[0].begin))
    return kept


def _changes(leg: Leg) -> Iterator[Slice]:
    """Yield the stretch before every entry, by what went on until then."""
    kind: Kind = "starting"
    now: Kind
    then: Kind
    before, step = 0.0, 0
    for entry in leg.attempt.entries:
        if isinstance(entry, Batches):
            step, now, then = entry.steps[-1], "training", "training"
        elif isinstance(entry, EventEntry) and (entry.event not in BESIDE or kind == "saving"):
            step, now, then = entry.counters.steps, kind, _next(entry, kind, is_fit=leg.is_fit)
        else:  # what takes no time, or was done beside the loop
            continue
        clock = max(before, entry.clock)
        yield Slice(now, leg.number, before, clock, step)
        before, kind = clock, then
    yield Slice(kind, leg.number, before, leg.seconds, step)


def _next(entry: EventEntry, kind: Kind, *, is_fit: bool) -> Kind:
    """Return what goes on behind an event."""
    rest: Kind = "training" if is_fit else "starting"
    kinds: dict[str, Kind] = {
        "epoch_start": "training",
        "validation_start": "validation",
        "validation_end": rest,
        "validation_cut": rest,
        "test_start": "test",
        "test_end": rest,
        "save_point": "saving",
        "checkpoint_saved": rest,
    }
    if entry.event == "replay":
        return "replaying" if entry.data["done"] < entry.data["batches"] else "training"
    return kinds.get(entry.event, "training" if kind == "saving" else kind)
