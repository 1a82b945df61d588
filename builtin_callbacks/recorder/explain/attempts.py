"""The attempts of a recorded run, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....core.system.extras import printable
from ....events.guarantee import verified
from ..format.records import Attempt
from . import words
from .attempt_summary import Leg, Return
from .sections import Section
from .verdict import circumstances, counters, ended

MOST_METRICS = 40
KINDS = {"train": "training", "validation": "validation", "test": "test"}


def end_section(name: str, leg: Leg) -> Section:
    """Return how a run ended, and where it was then.

    Args:
        name: the run's.
        leg: its last attempt.
    """
    closed = leg.ending
    spent = f" in {words.seconds(leg.last.seconds)} of training" if leg.is_fit and leg.last.seconds else ""
    said = list(dict.fromkeys([*circumstances(leg), counters(leg) + spent]))
    said += metrics_line(closed.data["metrics"]) if closed is not None else []
    told = [line for each in said for line in words.lines(each)]
    return Section(f"{printable(name)}: {ended(leg)}", told)


def metrics_line(metrics: Mapping[str, float]) -> list[str]:
    """Return the values of metrics in one text, or none; of very many, the first by name."""
    shown = sorted(metrics.items())[:MOST_METRICS]
    said = [f"{printable(name)}{words.TOGETHER}{words.number(value)}" for name, value in shown]
    said += [f"and {len(metrics) - MOST_METRICS:,} more"] * (len(metrics) > MOST_METRICS)
    return [", ".join(said)] if said else []


def attempts_section(found: Sequence[Leg]) -> Section:
    """Return when each attempt began, where it went on from, what was lost with that, and how it ended."""
    told: list[str] = []
    before: Leg | None = None
    for leg in found:
        head = f"  {leg.number}  "
        for each in _told(leg, before):
            told += words.lines(each, head, "     ")
            head = "     "
        before = leg
    return Section("attempts", told)


def attempts_in_short(found: Sequence[Leg]) -> str:
    """Return how many attempts there were, and how much was done again."""
    fits = [leg for leg in found if leg.is_fit]
    again = [each.again() for leg in fits for each in leg.returns]
    steps = sum(each.steps for each in again if each is not None)
    killed = sum(leg.ending is None for leg in fits)
    back = sum(each.is_roll_back for leg in fits for each in leg.returns)
    said = [words.counted(len(fits), "attempt") + f", {killed:,} of them killed" * (killed > 0)]
    said += [f"rolled back {words.times(back)}"] if back else []
    said.append(f"{words.counted(steps, 'step')} lost with that, and done again" if steps else "no step was done twice")
    return ", ".join(said)


def compared(leg: Leg) -> Iterator[str]:
    """Yield what comparing the steps that were done again has shown."""
    for entry in leg.happenings("resume_verified"):
        steps, difference = entry.data["steps"], entry.data["difference"]
        if steps:
            yield verified(steps)
        if difference is not None:
            yield f"what was done again {printable(difference)}"


def _told(leg: Leg, before: Leg | None) -> Iterator[str]:
    attempt = leg.attempt
    size = f" on {attempt.world_size:,} processes" if attempt.world_size > 1 else ""
    gap = leg.gap(before) if before is not None else None
    later = f", {words.seconds(gap)} behind the end of {leg.number - 1}" if gap is not None else ""
    yield f"{KINDS[attempt.phase]}{size}, begun {leg.begun}{later}"
    if before is not None and leg.is_fit:
        yield from _changes(before.attempt, attempt)
    if leg.is_fit and all(each.is_roll_back for each in leg.returns):
        yield "from the start"
    for each in leg.returns:
        yield _returned(each)
    yield from compared(leg)
    yield f"{ended(leg)} after {words.seconds(leg.seconds)}: {counters(leg)}"


def _returned(each: Return) -> str:
    source = "a state without a file" if each.path is None else printable(each.path)
    verb = "went back to" if each.is_roll_back else "resumed from"
    said = f"{verb} {source} at {words.place(each.place)}"
    again = each.again()
    if again is None:
        return said + "; no work was lost" * (each.left is not None)
    steps, batches = words.counted(again.steps, "step"), words.counted(again.batch, "batch")
    samples = words.counted(again.samples, "sample")
    was = "was" if again.steps == 1 else "were"
    return f"{said}; {steps} ({batches}, {samples}, {words.seconds(again.seconds)}) {was} lost"


def _changes(before: Attempt, after: Attempt) -> Iterator[str]:
    """Yield what is not as it was in the attempt before."""
    pairs: list[tuple[str, Any, Any]] = [("processes", before.world_size, after.world_size)]
    for old, new in ((before.versions, after.versions), (before.hyper_parameters, after.hyper_parameters)):
        pairs += [(name, old.get(name, "not given"), new.get(name, "not given")) for name in sorted({*old, *new})]
    said = [f"{printable(name)} {printable(new)} (was {printable(old)})" for name, old, new in pairs if old != new]
    if said:
        yield f"changed: {', '.join(said)}"
