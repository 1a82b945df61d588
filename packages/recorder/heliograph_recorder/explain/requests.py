"""The requests to the control in a recorded run: their outcomes, and the sections of a story about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heliograph.events import CHANGES, Request, Verb
from heliograph.spi import printable

from ..format.records import TIMED, Counters, RepeatEntry, RequestEntry, change_of
from ..verbs import EVALUATION_VERB, SERVED, TAKEN_BACK, VERBS
from . import words
from .attempt_summary import AttemptSummary
from .words import StorySection

CAN_BE_SERVED = {*SERVED.values(), *CHANGES}
GRANTED_BY: Final[dict[str, Verb]] = {"log": "log", "validation_end": "validation", "save_point": "save"}
ROUTINE = ("log", "validation", "save", "hold_step", "scale_loss")
MAX_REASONS = 10  # of one plugin for one request
MAX_POSITIONS = 40


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request and its outcome.

    Attributes:
        attempt: the number of its attempt.
        clock: seconds between the beginning of the attempt and the request.
        request: the request, with the count of its repetitions.
        is_unserved: whether it was never served; None if unknown, or if such a request is not served.
        taken_back: the request that withdrew or vetoed it, if any.
    """

    attempt: int
    clock: float
    request: Request
    is_unserved: bool | None = None
    taken_back: Request | None = None


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
        return sum(outcome.request.times for outcome in self.requests)

    @property
    def never(self) -> int:  # served
        return sum(outcome.is_unserved is True for outcome in self.requests)

    @property
    def reason(self) -> str:
        different = len({outcome.request.reason for outcome in self.requests})
        if different == 1:
            return self.first.reason
        return f"{self.first.reason} ... {self.last.reason} ({different:,} different reasons)"

    @property
    def what(self) -> str:
        subjects = {outcome.request.what for outcome in self.requests}
        return self.first.what if len(subjects) == 1 else self.first.verb  # changes to different values

    @property
    def is_routine(self) -> bool:
        return self.first.verb in ROUTINE

    @property
    def requester(self) -> str:
        rank = self.first.rank
        return self.first.by if rank is None else f"{self.first.by} on rank {rank}"


# A request that was postponed, cut short, refused or never served: the clock, the position, and a text.
Incident = tuple[float, Counters, str]


def requests_of(attempt: AttemptSummary) -> list[RequestOutcome]:
    served = {number for entry in attempt.events() for number in entry.data.get("asked", ())}
    repeated = {entry.number: entry.times for entry in attempt.attempt.entries if isinstance(entry, RepeatEntry)}
    is_over = attempt.ending is not None or not attempt.is_last
    outcomes, clock = list[RequestOutcome](), 0.0
    takers: dict[int, Request] = {}
    for entry in attempt.attempt.entries:
        if isinstance(entry, RequestEntry | RepeatEntry):
            taker = entry.request if isinstance(entry, RequestEntry) else takers.get(entry.number)
            if taker is not None and taker.verb in TAKEN_BACK:
                takers[entry.number] = taker
                outcomes = [_take_back(outcome, taker) for outcome in outcomes]
        if isinstance(entry, RequestEntry):
            request, times = entry.request, repeated.get(entry.number, 1)
            if times > request.times:
                request = replace(request, times=times)
            is_unserved = None
            if request.verb in CAN_BE_SERVED and (is_over or entry.number in served):
                has_stopped = request.verb == "stop" and attempt.status == "stopped"
                is_unserved = entry.number not in served and not has_stopped
            outcomes.append(RequestOutcome(attempt.number, clock, request, is_unserved))
        elif isinstance(entry, TIMED):
            clock = max(clock, entry.clock)
    return outcomes


def _take_back(outcome: RequestOutcome, by: Request) -> RequestOutcome:
    is_open = outcome.is_unserved and outcome.taken_back is None
    is_target = is_open and outcome.request.verb == TAKEN_BACK[by.verb]
    return replace(outcome, taken_back=by) if is_target else outcome


def group_requests(outcomes: Iterable[RequestOutcome]) -> list[RequestGroup]:
    """Group requests by subject, requester and reason, in the order of their first request.

    A plugin with many reasons for the same request, for example with a number in them, gets one group.
    """
    groups = _group_by(
        outcomes, lambda request: (request.what, request.by, request.rank, request.event, request.reason)
    )
    kinds = Counter(_kind(group.first) for group in groups)
    many = {kind for kind, count in kinds.items() if count > MAX_REASONS}
    if not many:
        return groups
    merged = _group_by((outcome for group in groups if _kind(group.first) in many for outcome in group.requests), _kind)
    single = [group for group in groups if _kind(group.first) not in many]
    return sorted([*single, *merged], key=lambda group: (group.requests[0].attempt, group.requests[0].clock))


def _kind(request: Request) -> tuple[object, ...]:
    return request.verb, request.by, request.rank


def _group_by(outcomes: Iterable[RequestOutcome], key: Callable[[Request], tuple[object, ...]]) -> list[RequestGroup]:
    groups: dict[tuple[object, ...], list[RequestOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome.request), []).append(outcome)
    return [RequestGroup(tuple(group)) for group in groups.values()]


def incidents(attempt: AttemptSummary, outcomes: Sequence[RequestOutcome]) -> list[Incident]:
    unordered = [*_postponed(attempt, outcomes), *_refused(attempt), *_never_served(attempt, outcomes)]
    return sorted(unordered, key=lambda incident: incident[0])


def _postponed(attempt: AttemptSummary, outcomes: Sequence[RequestOutcome]) -> Iterator[Incident]:
    for outcome in outcomes:
        request = outcome.request
        if request.verb == "veto_stop":
            times = f" at {request.times:,} boundaries in a row" if request.times > 1 else ""
            text = f"the stop was postponed by {request.by}{times}: {request.reason}"
            yield outcome.clock, _counters(request), text
        elif request.verb == EVALUATION_VERB:
            event = "validation was cut short and postponed" if attempt.is_fit else "evaluation was cut short"
            yield outcome.clock, _counters(request), f"the {event} by {request.by}: {request.reason}"


def _refused(attempt: AttemptSummary) -> Iterator[Incident]:
    for entry in attempt.events("change_served"):
        if refusal := entry.data["refusal"]:
            request = change_of(entry.data)
            text = f"the {request.what} that {request.by} requested ({request.reason}) could not be done: {refusal}"
            yield entry.clock, entry.counters, text


def _never_served(attempt: AttemptSummary, outcomes: Sequence[RequestOutcome]) -> Iterator[Incident]:
    roll_backs = [restore.clock for restore in attempt.restores if restore.is_roll_back]
    unserved = [outcome for outcome in outcomes if outcome.is_unserved]
    open_groups = group_requests(outcome for outcome in unserved if outcome.taken_back is None)
    for group in [*open_groups, *group_requests(outcome for outcome in unserved if outcome.taken_back is not None)]:
        request, last = group.first, group.requests[-1]
        is_rolled_back = any(clock >= last.clock for clock in roll_backs)
        why = "the run rolled back first" if is_rolled_back else _why_unserved(attempt)
        if (taker := last.taken_back) is not None:
            why = f"{'vetoed' if taker.verb == 'veto_save' else 'withdrawn'} by {taker.by} ({taker.reason})"
        noun = "end of the epoch" if request.verb == "end_epoch" else request.what
        times = f" {words.times(len(group.requests))}" if len(group.requests) > 1 else ""
        text = f"the {noun} that {group.requester} requested{times} ({group.reason}) was never served: {why}"
        yield last.clock, _counters(last.request), text


def _why_unserved(attempt: AttemptSummary) -> str:
    if attempt.switched_off is not None:
        return "the recorder was switched off first"
    return {"failed": "the run failed", "interrupted": "the run was interrupted"}.get(
        attempt.status, "the run was killed" if attempt.ending is None else "the run ended first"
    )


def _counters(request: Request) -> Counters:
    return Counters(request.epoch, request.batch, steps=request.step)


def requests_section(outcomes: Sequence[RequestOutcome]) -> StorySection:
    rows = []
    for group in sorted(group_requests(outcomes), key=lambda group: not group.is_routine):
        reason = f": {group.reason}" if group.reason else ""
        text = f"{printable(group.requester)}, {positions(group)}{printable(reason)}"
        rows.append((printable(group.what), words.times(group.times), text))
    return StorySection("requests", words.table(rows) or ["  none"])


def decisions_section(
    attempts: Sequence[AttemptSummary], outcomes: Mapping[int, Sequence[RequestOutcome]]
) -> StorySection:
    lines = words.lines(text) if (text := _granted(attempts)) else []
    for attempt in attempts:
        for _, counters, incident in incidents(attempt, outcomes[attempt.number]):
            lines += words.lines(f"{words.position(counters)}: {printable(incident)}", "  ", "    ")
    return StorySection("decisions", lines)


def positions(group: RequestGroup) -> str:
    """Return where requests were made: the first and the last step of routine ones."""
    first, last = group.first, group.last
    during = f"during {first.event}, " if first.event and not group.is_routine else ""
    if len(group.requests) == 1:
        return during + _position(first)
    if group.is_routine:
        return f"step {first.step:,} to {last.step:,}"
    shown = [_position(outcome.request) for outcome in group.requests[:MAX_POSITIONS]]
    omitted = len(group.requests) - MAX_POSITIONS
    more = f" and {omitted:,} more, the last at {_position(last)}" if omitted > 0 else ""
    return during + "; ".join(shown) + more


def _position(request: Request) -> str:
    return words.position(_counters(request))


def _granted(attempts: Sequence[AttemptSummary]) -> str:
    counts = _counts_in_words(_count_granted(attempts))
    text = f"granted: {words.join_words(counts)}" if counts else ""
    for loss in dict.fromkeys(attempt.loss for attempt in attempts):
        lost = _counts_in_words(_count_granted([attempt for attempt in attempts if attempt.loss == loss], lost=True))
        text += f"; {loss}: {words.join_words(lost)}" if lost else ""
    return text


def _count_granted(attempts: Iterable[AttemptSummary], *, lost: bool = False) -> dict[Verb, int]:
    """Count granted requests, or only the lost ones."""
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


def _counts_in_words(counts: Mapping[Verb, int]) -> list[str]:
    return [words.count_things(count, VERBS[verb].noun, VERBS[verb].plural) for verb, count in counts.items() if count]
