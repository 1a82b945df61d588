"""Sentences on the requests to the control."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from heliograph import Request
from heliograph.events import Verb
from heliograph.spi import CHANGES, printable

from ..format.records import change_of
from ..verbs import VERBS
from . import words
from .attempt_summary import AttemptSummary
from .requests import RequestGroup, RequestOutcome, group_requests, incidents
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
