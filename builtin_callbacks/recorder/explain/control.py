"""What plugins asked of the loop, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.system.extras import printable
from ....events import Request
from . import words
from .attempt_summary import Leg
from .requests import Ask, Group, granted, groups, incidents
from .sections import Section

NOTHING = "  nobody asked for anything"
MOST_PLACES = 40
NOUNS = {
    "log": ("log", "logs"),
    "validation": ("validation", "validations"),
    "save": ("save", "saves"),
    "stop": ("stop", "stops"),
    "veto_stop": ("veto", "vetoes"),
    "end_epoch": ("early end of an epoch", "early ends of epochs"),
    "skip_batch": ("skipped batch", "skipped batches"),
    "skip_step": ("skipped step", "skipped steps"),
    "hold_step": ("held step", "held steps"),
    "scale_loss": ("scaled loss", "scaled losses"),
    "next_phase": ("next phase", "next phases"),
    "cut_validation": ("cut validation", "cut validations"),
    "roll_back": ("roll-back", "roll-backs"),
}


def control_section(asks: Sequence[Ask]) -> Section:
    """Return every request: those alike in a line, with how many they were, the first and the last."""
    return Section("what was asked", _table(groups(asks)) or [NOTHING])


def decisions_section(found: Sequence[Leg], asks: Mapping[int, Sequence[Ask]]) -> Section:
    """Return what was granted, and what was put off or never served.

    Args:
        found: the attempts.
        asks: every request, by the number of its attempt.
    """
    done = [_counted(count, verb) for verb, count in granted(found).items() if count]
    told = words.lines(f"granted: {words.listed(done)}") if done else []
    for leg in found:
        for each in incidents(leg, asks[leg.number]):
            told += words.lines(f"{words.place(each.place)}: {printable(each.text)}", "  ", "    ")
    return Section("what was decided", told)


def asked_in_short(asks: Sequence[Ask]) -> str:
    """Return how often what was asked for."""
    counts: dict[str, int] = {}
    for ask in asks:
        counts[ask.request.verb] = counts.get(ask.request.verb, 0) + ask.request.times
    never = sum(ask.is_open is True for ask in asks)
    said = words.listed([_counted(count, verb) for verb, count in counts.items()]) or "nothing"
    return f"asked for: {said}" + f"; {never:,} never served" * (never > 0)


def _counted(count: int, verb: str) -> str:
    return words.counted(count, *NOUNS[verb])


def _table(found: Sequence[Group]) -> list[str]:
    rows = []
    for group in sorted(found, key=lambda each: not each.is_routine):
        reason = f": {group.reason}" if group.reason else ""
        rows.append(
            (
                group.first.verb,
                words.times(group.times),
                f"{printable(group.who)}, {when(group)}{printable(reason)}",
            )
        )
    return words.table(rows)


def when(group: Group) -> str:
    """Return when a request was made: of a routine one the first and the last, of others every place."""
    first, last = group.first, group.last
    during = f"during {first.event}, " if first.event and not group.is_routine else ""
    if len(group.asks) == 1:
        return during + _at(first)
    if group.is_routine:
        return f"step {first.step:,} to {last.step:,}"
    shown = [_at(ask.request) for ask in group.asks[:MOST_PLACES]]
    left = len(group.asks) - MOST_PLACES
    more = f" and {left:,} more, the last at {_at(last)}" if left > 0 else ""
    return during + "; ".join(shown) + more


def _at(request: Request) -> str:
    return f"epoch {request.epoch}, batch {request.batch}, step {request.step}"
