"""What was asked of the control in a recorded run, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ....events import Request
from ..format.records import TIMED, Counters, RepeatEntry, RequestEntry
from . import words
from .attempt_summary import Leg

SERVED_BY = {
    "log": "log",
    "validation": "validation_start",
    "save": "save_point",
    "end_epoch": "epoch_end",
    "stop": "train_end",
}
GRANTED_BY = {"log": "log", "validation_end": "validation", "save_point": "save"}
MOST_REASONS = 10  # of one plugin for one request
ROUTINE = ("log", "validation", "save", "hold_step", "scale_loss")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        leg: the number of its attempt.
        clock: when, in seconds since the attempt began.
        request: what was asked, with the count of its repetitions.
        is_open: whether it was never served; None where that is not recorded, or needs no serving.
    """

    leg: int
    clock: float
    request: Request
    is_open: bool | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The same request by the same plugin, made once or again and again."""

    asks: tuple[Ask, ...]

    @property
    def first(self) -> Request:
        """The first of them."""
        return self.asks[0].request

    @property
    def last(self) -> Request:
        """The last of them."""
        return self.asks[-1].request

    @property
    def times(self) -> int:
        """How often it was made."""
        return sum(ask.request.times for ask in self.asks)

    @property
    def never(self) -> int:
        """How many were never served."""
        return sum(ask.is_open is True for ask in self.asks)

    @property
    def reason(self) -> str:
        """Why; of different reasons the first and the last."""
        different = len({ask.request.reason for ask in self.asks})
        if different == 1:
            return self.first.reason
        return f"{self.first.reason} ... {self.last.reason} ({different:,} different reasons)"

    @property
    def is_routine(self) -> bool:
        """Whether it is one that schedules make all the time."""
        return self.first.verb in ROUTINE

    @property
    def who(self) -> str:
        """Who asked, and on which rank."""
        rank = self.first.rank
        return self.first.by if rank is None else f"{self.first.by} on rank {rank}"


@dataclass(frozen=True, slots=True)
class Incident:
    """What was granted, put off or dropped in a way that is worth a sentence of its own."""

    leg: int
    clock: float
    counters: Counters
    text: str


def asks_of(leg: Leg) -> list[Ask]:
    """Return every request of an attempt."""
    served = {number for entry in leg.happenings() for number in entry.data.get("asked", ())}
    repeated = {entry.number: entry.times for entry in leg.attempt.entries if isinstance(entry, RepeatEntry)}
    has_ended = leg.ending is not None
    found, clock = [], 0.0
    for entry in leg.attempt.entries:
        if isinstance(entry, RequestEntry):
            request, often = entry.request, repeated.get(entry.number, 1)
            if often > request.times:
                request = replace(request, times=often)
            is_open = None
            if request.verb in SERVED_BY and (has_ended or not leg.is_last or entry.number in served):
                is_open = entry.number not in served and not (request.verb == "stop" and leg.status == "stopped")
            found.append(Ask(leg.number, clock, request, is_open))
        elif isinstance(entry, TIMED):
            clock = max(clock, entry.clock)
    return found


def groups(asks: Iterable[Ask]) -> list[Group]:
    """Return requests grouped by what, who and why, in the order in which each was first made.

    A plugin that has more than a few reasons for the same request, such as one with a number in it, is one group.
    """
    found = _grouped(asks, lambda request: (request.verb, request.by, request.rank, request.event, request.reason))
    kinds = Counter(_kind(group.first) for group in found)
    many = {kind for kind, count in kinds.items() if count > MOST_REASONS}
    merged = _grouped(
        (ask for group in found if _kind(group.first) in many for ask in group.asks),
        _kind,
    )
    kept = [group for group in found if _kind(group.first) not in many]
    return sorted([*kept, *merged], key=lambda group: (group.asks[0].leg, group.asks[0].clock)) if merged else kept


def _kind(request: Request) -> tuple[object, ...]:
    return request.verb, request.by, request.rank


def _grouped(asks: Iterable[Ask], key: Callable[[Request], tuple[object, ...]]) -> list[Group]:
    found: dict[tuple[object, ...], list[Ask]] = {}
    for ask in asks:
        found.setdefault(key(ask.request), []).append(ask)
    return [Group(tuple(each)) for each in found.values()]


def incidents(leg: Leg, asks: Sequence[Ask]) -> list[Incident]:
    """Return what became of requests in an attempt where that is not the rule, in the order in which it came about."""
    found = [*_put_off(leg, asks), *_never_served(leg, asks)]
    return sorted(found, key=lambda incident: incident.clock)


def granted(found: Iterable[Leg]) -> dict[str, int]:
    """Return how many logs, validations, saves, ends of an epoch and stops were granted."""
    counts = dict.fromkeys(("log", "validation", "save", "end_epoch", "stop"), 0)
    for leg in found:
        counts["stop"] += leg.is_fit and leg.status == "stopped"
        for entry in leg.happenings() if leg.is_fit else ():
            if entry.event in GRANTED_BY:
                counts[GRANTED_BY[entry.event]] += 1
            elif entry.event == "epoch_end" and entry.data.get("asked"):
                counts["end_epoch"] += 1
    return counts


def _put_off(leg: Leg, asks: Sequence[Ask]) -> Iterator[Incident]:
    for ask in asks:
        request = ask.request
        if request.verb == "veto_stop":
            often = f", {request.times:,} boundaries in a row" if request.times > 1 else ""
            text = f"the stop was put off by {request.by}{often}: {request.reason}"
            yield Incident(leg.number, ask.clock, _place(request), text)
        elif request.verb == "cut_validation":
            what = "validation was cut short, and put off" if leg.is_fit else "evaluation was cut short"
            text = f"the {what}, by {request.by}: {request.reason}"
            yield Incident(leg.number, ask.clock, _place(request), text)


def _never_served(leg: Leg, asks: Sequence[Ask]) -> Iterator[Incident]:
    returns = [each.clock for each in leg.returns if each.is_roll_back]
    for group in groups(ask for ask in asks if ask.is_open):
        first, last = group.asks[0], group.asks[-1]
        request = first.request
        why = "the run went back before" if any(clock >= last.clock for clock in returns) else _why_open(leg)
        noun = {"end_epoch": "end of the epoch"}.get(request.verb, request.verb)
        often = f" {words.times(len(group.asks))}" if len(group.asks) > 1 else ""
        text = f"the {noun} that {group.who} asked for{often} ({group.reason}) was never served: {why}"
        yield Incident(leg.number, last.clock, _place(last.request), text)


def _why_open(leg: Leg) -> str:
    return {"failed": "the run failed", "interrupted": "the run was interrupted"}.get(
        leg.status, "the run was killed" if leg.ending is None else "the run ended before"
    )


def _place(request: Request) -> Counters:
    return Counters(request.epoch, request.batch, steps=request.step)
