"""The requests to the control in a recorded run as data, and what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heliograph import Request
from heliograph.events import Verb
from heliograph.spi import CHANGES, printable

from ..format.records import TIMED, Counters, EventEntry, RepeatEntry, RequestEntry, change_of
from ..verbs import COUNTED, EVALUATION_VERB, TAKEN_BACK, VERBS, WITHIN_A_BATCH
from . import words
from .attempt_summary import AttemptSummary
from .words import Section

GRANTED_BY: Final[dict[str, Verb]] = {"log": "log", "validation_end": "validation", "save_point": "save"}
MAX_POSITIONS = 40


def requests_section(requests: Sequence[RequestOutcome]) -> Section:
    return Section("requests", _table(group_requests(requests)) or ["  none"])


def decisions_section(attempts: Sequence[AttemptSummary], requests: Mapping[int, Sequence[RequestOutcome]]) -> Section:
    lines = words.lines(text) if (text := _granted(attempts)) else []
    for attempt in attempts:
        for each in incidents(attempt, requests[attempt.number]):
            lines += words.lines(f"{words.position(each.counters)}: {printable(each.text)}", "  ", "    ")
    return Section("decisions", lines)


def requests_in_short(requests: Sequence[RequestOutcome]) -> str:
    counts: dict[Verb, int] = {}
    for each in requests:
        counts[each.request.verb] = counts.get(each.request.verb, 0) + each.request.times
    never = sum(each.is_unserved is True for each in requests)
    text = words.join_words([_count(count, verb) for verb, count in counts.items()]) or "nothing"
    return f"requested: {text}" + f"; {never:,} never served" * (never > 0)


def _granted(attempts: Sequence[AttemptSummary]) -> str:
    counts = [_count(count, verb) for verb, count in _count_granted(attempts).items() if count]
    text = f"granted: {words.join_words(counts)}" if counts else ""
    for loss in dict.fromkeys(attempt.loss for attempt in attempts):
        losing = [attempt for attempt in attempts if attempt.loss == loss]
        lost = [_count(count, verb) for verb, count in _count_granted(losing, lost=True).items() if count]
        text += f"; {loss}: {words.join_words(lost)}" if lost else ""
    return text


def _count_granted(attempts: Iterable[AttemptSummary], *, lost: bool = False) -> dict[Verb, int]:
    names: tuple[Verb, ...] = ("log", "validation", "save", "end_epoch", "stop", *CHANGES)
    counts = dict.fromkeys(names, 0)
    for attempt in attempts:
        counts["stop"] += attempt.is_fit and attempt.status == "stopped" and not lost
        for entry in attempt.events() if attempt.is_fit else ():
            if lost and not attempt.has_lost(entry.counters):
                continue
            if entry.event in GRANTED_BY:
                counts[GRANTED_BY[entry.event]] += 1
            elif entry.event == "epoch_end" and entry.data.get("asked"):
                counts["end_epoch"] += 1
            elif entry.event == "change_served" and entry.data["changed"]:
                counts[change_of(entry.data).verb] += 1
    return counts


def _count(count: int, verb: Verb) -> str:
    return words.count_things(count, VERBS[verb].noun, VERBS[verb].plural)


def _table(groups: Sequence[RequestGroup]) -> list[str]:
    rows = []
    for group in sorted(groups, key=lambda each: not each.is_routine):
        reason = f": {group.reason}" if group.reason else ""
        text = f"{printable(group.requester)}, {positions(group)}{printable(reason)}"
        rows.append((printable(group.what), words.times(group.times), text))
    return words.table(rows)


def positions(group: RequestGroup) -> str:
    return _places(group) + (f", {group.effect}" if group.effect else "")


def _places(group: RequestGroup) -> str:
    first, last = group.first, group.last
    during = f"during {first.event}, " if first.event and not group.is_routine else ""
    if len(group.requests) == 1:
        return during + _position(first)
    if group.is_routine:
        return f"step {first.step:,} to {last.step:,}"
    shown = [_position(each.request) for each in group.requests[:MAX_POSITIONS]]
    left = len(group.requests) - MAX_POSITIONS
    more = f" and {left:,} more, the last at {_position(last)}" if left > 0 else ""
    return during + "; ".join(shown) + more


def _position(request: Request) -> str:
    return f"epoch {request.epoch}, batch {request.batch}, step {request.step}"


SERVED_BY = {
    "log": "log",
    "validation": "validation_start",
    "save": "save_point",
    "end_epoch": "epoch_end",
    "stop": "train_end",
    **dict.fromkeys(CHANGES, "change_served"),
}
MAX_REASONS = 10  # of one plugin for one request
ROUTINE = ("log", "validation", "save", "hold_step", "scale_loss")


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request.

    Attributes:
        attempt: the number of its attempt.
        clock: when, in seconds since the attempt began.
        request: what was requested, with the count of its repetitions.
        is_unserved: whether it was never served; None if that is not recorded, or if such a request is not served.
        taken_back: what took it back; None where nothing did.
        effect: how what it led to was lost with its attempt, or that it changed nothing, in words; else empty.
    """

    attempt: int
    clock: float
    request: Request
    is_unserved: bool | None = None
    taken_back: Request | None = None
    effect: str = ""


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """The same request of the same plugin, made once or repeatedly."""

    requests: tuple[RequestOutcome, ...]

    @property
    def first(self) -> Request:
        return self.requests[0].request

    @property
    def last(self) -> Request:
        return self.requests[-1].request

    @property
    def times(self) -> int:
        return sum(each.request.times for each in self.requests)

    @property
    def never(self) -> int:
        return sum(each.is_unserved is True for each in self.requests)

    @property
    def effect(self) -> str:
        counts = Counter(each.effect for each in self.requests if each.effect)
        if sum(counts.values()) == self.times:
            return " and ".join(counts)
        return " and ".join(f"{count:,} of them {effect}" for effect, count in counts.items())

    @property
    def reason(self) -> str:
        different = len({each.request.reason for each in self.requests})
        if different == 1:
            return self.first.reason
        return f"{self.first.reason} ... {self.last.reason} ({different:,} different reasons)"

    @property
    def what(self) -> str:
        return self.first.what if len({each.request.what for each in self.requests}) == 1 else self.first.verb

    @property
    def is_routine(self) -> bool:
        return self.first.verb in ROUTINE

    @property
    def requester(self) -> str:
        rank = self.first.rank
        return self.first.by if rank is None else f"{self.first.by} on rank {rank}"


@dataclass(frozen=True, slots=True)
class Incident:
    """A request that was postponed, cut short or never served."""

    attempt: int
    clock: float
    counters: Counters
    text: str


def requests_of(attempt: AttemptSummary) -> list[RequestOutcome]:
    served = {number: entry for entry in attempt.events() for number in entry.data.get("asked", ())}
    repeated = {entry.number: entry.times for entry in attempt.attempt.entries if isinstance(entry, RepeatEntry)}
    is_over = attempt.ending is not None or not attempt.is_last
    found, clock = list[RequestOutcome](), 0.0
    takers: dict[int, Request] = {}
    for entry in attempt.attempt.entries:
        if isinstance(entry, RequestEntry | RepeatEntry):
            taker = entry.request if isinstance(entry, RequestEntry) else takers.get(entry.number)
            if taker is not None and taker.verb in TAKEN_BACK:
                takers[entry.number] = taker
                found = [_taken_back(each, taker) for each in found]
        if isinstance(entry, RequestEntry):
            request, times = entry.request, repeated.get(entry.number, 1)
            if times > request.times:
                request = replace(request, times=times)
            is_unserved = None
            if request.verb in SERVED_BY and (is_over or entry.number in served):
                has_stopped = request.verb == "stop" and attempt.status == "stopped"
                is_unserved = entry.number not in served and not has_stopped
            effect = "" if is_unserved else _effect(attempt, request, served.get(entry.number))
            found.append(RequestOutcome(attempt.number, clock, request, is_unserved, effect=effect))
        elif isinstance(entry, TIMED):
            clock = max(clock, entry.clock)
    return found


def _effect(attempt: AttemptSummary, request: Request, served: EventEntry | None) -> str:
    if served is not None and not (served.data.get("changed", True) or served.data["refusal"]):
        return "changed nothing"
    if request.verb in COUNTED or request.verb == "stop":
        return ""
    done = request.batch + (request.event in WITHIN_A_BATCH)
    place = Counters(request.epoch, done, steps=request.step) if served is None else served.counters
    return attempt.loss if attempt.has_lost(place) else ""


def _taken_back(outcome: RequestOutcome, by: Request) -> RequestOutcome:
    is_open = outcome.is_unserved and outcome.taken_back is None
    is_meant = is_open and outcome.request.verb == TAKEN_BACK[by.verb]
    return replace(outcome, taken_back=by) if is_meant else outcome


def group_requests(requests: Iterable[RequestOutcome]) -> list[RequestGroup]:
    groups = _group_by(
        requests, lambda request: (request.what, request.by, request.rank, request.event, request.reason)
    )
    kinds = Counter(_kind(group.first) for group in groups)
    many = {kind for kind, count in kinds.items() if count > MAX_REASONS}
    merged = _group_by(
        (each for group in groups if _kind(group.first) in many for each in group.requests),
        _kind,
    )
    kept = [group for group in groups if _kind(group.first) not in many]
    if not merged:
        return kept
    return sorted([*kept, *merged], key=lambda group: (group.requests[0].attempt, group.requests[0].clock))


def _kind(request: Request) -> tuple[object, ...]:
    return request.verb, request.by, request.rank


def _group_by(requests: Iterable[RequestOutcome], key: Callable[[Request], tuple[object, ...]]) -> list[RequestGroup]:
    groups: dict[tuple[object, ...], list[RequestOutcome]] = {}
    for each in requests:
        groups.setdefault(key(each.request), []).append(each)
    return [RequestGroup(tuple(each)) for each in groups.values()]


def incidents(attempt: AttemptSummary, requests: Sequence[RequestOutcome]) -> list[Incident]:
    found = [*_postponed(attempt, requests), *_refused(attempt), *_never_served(attempt, requests)]
    return sorted(found, key=lambda incident: incident.clock)


def _postponed(attempt: AttemptSummary, requests: Sequence[RequestOutcome]) -> Iterator[Incident]:
    for each in requests:
        request = each.request
        if request.verb == "veto_stop":
            times = f" at {request.times:,} boundaries in a row" if request.times > 1 else ""
            text = f"the stop was postponed by {request.by}{times}: {request.reason}"
            yield Incident(attempt.number, each.clock, _counters(request), text)
        elif request.verb == EVALUATION_VERB:
            what = "validation was cut short and postponed" if attempt.is_fit else "evaluation was cut short"
            text = f"the {what} by {request.by}: {request.reason}"
            yield Incident(attempt.number, each.clock, _counters(request), text)


def _refused(attempt: AttemptSummary) -> Iterator[Incident]:
    for entry in attempt.events("change_served"):
        if refusal := entry.data["refusal"]:
            request = change_of(entry.data)
            text = f"the {request.what} that {request.by} requested ({request.reason}) could not be done: {refusal}"
            yield Incident(attempt.number, entry.clock, entry.counters, text)


def _never_served(attempt: AttemptSummary, requests: Sequence[RequestOutcome]) -> Iterator[Incident]:
    roll_backs = [each.clock for each in attempt.restores if each.is_roll_back]
    unserved = [each for each in requests if each.is_unserved]
    kept = group_requests(each for each in unserved if each.taken_back is None)
    for group in [*kept, *group_requests(each for each in unserved if each.taken_back is not None)]:
        request, last = group.first, group.requests[-1]
        is_rolled_back = any(clock >= last.clock for clock in roll_backs)
        why = "the run rolled back first" if is_rolled_back else _why_unserved(attempt)
        if (taker := last.taken_back) is not None:
            done = "vetoed" if taker.verb == "veto_save" else "withdrawn"
            why = f"{done} by {taker.by} ({taker.reason})"
        noun = {"end_epoch": "end of the epoch"}.get(request.verb, request.what)
        times = f" {words.times(len(group.requests))}" if len(group.requests) > 1 else ""
        text = f"the {noun} that {group.requester} requested{times} ({group.reason}) was never served: {why}"
        yield Incident(attempt.number, last.clock, _counters(last.request), text)


def _why_unserved(attempt: AttemptSummary) -> str:
    if attempt.switched_off is not None:
        return "the recorder was switched off first"
    return {"failed": "the run failed", "interrupted": "the run was interrupted"}.get(
        attempt.status, "the run was killed" if attempt.ending is None else "the run ended first"
    )


def _counters(request: Request) -> Counters:
    return Counters(request.epoch, request.batch, steps=request.step)
