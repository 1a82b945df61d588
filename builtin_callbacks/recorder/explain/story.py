"""The story of a recorded run, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....core.system.extras import printable
from ....events.catalogue import CATALOGUE
from ..format.damage import damage_in_short
from ..format.gc_pause import collector_paused
from ..format.records import Recording
from . import words
from .attempt_summary import Leg, legs, main_leg, run_name
from .attempts import attempts_in_short, attempts_section, end_section
from .checkpoints import checkpoints_in_short, checkpoints_section
from .control import asked_in_short, control_section, decisions_section
from .costs import by_plugin, costs, costs_in_short, costs_section, timed_seconds, untimed
from .requests import asks_of
from .saves import saves_of
from .sections import Section, joined
from .verdict import circumstances, ended


@collector_paused()
def story(recording: Recording) -> str:
    """Return how a run went: its end, its attempts, what was asked and decided, its checkpoints and its plugins."""
    found = legs(recording)
    asks = {leg.number: asks_of(leg) for leg in found}
    return joined(
        [
            end_section(run_name(found), main_leg(found)),
            attempts_section(found),
            control_section([ask for each in asks.values() for ask in each]),
            decisions_section(found, asks),
            checkpoints_section(found, saves_of(found)),
            _plugins(found),
            _others(found),
            costs_section(by_plugin(costs(found)), timed_seconds(found), untimed(found)),
            notes_section([note for leg in found if leg.ending is not None for note in leg.ending.data["notes"]]),
            _damage(found),
        ]
    )


def brief(recording: Recording) -> list[str]:
    """Return five lines: how the run ended, its attempts, what was asked, its checkpoints, its plugins' time."""
    found = legs(recording)
    last = main_leg(found)
    why = "".join(f": {reason}" for reason in circumstances(last)[:1])
    return [
        f"{ended(last)} at step {last.last.steps:,}{why}",
        attempts_in_short(found),
        asked_in_short([ask for leg in found for ask in asks_of(leg)]),
        checkpoints_in_short(found, saves_of(found)),
        costs_in_short(by_plugin(costs(found)), timed_seconds(found)),
    ]


def notes_section(notes: Sequence[str]) -> Section:
    """Return what plugins had to say."""
    return Section("notes", [line for note in notes for line in words.lines(printable(note), "  ", "    ")])


def _plugins(found: Sequence[Leg]) -> Section:
    rows = []
    for leg in found:
        for entry in leg.happenings("plugin_changed", "plugin_failed"):
            data = {name: printable(value) for name, value in entry.data.items()}
            if entry.event == "plugin_changed":
                text = f"{data['plugin']} was {data['change']} by {data['by']}"
            else:
                text = f"{data['plugin']} failed on {data['event']}, and the run went on: {data['error']}"
            rows.append((f"step {entry.place.steps}", text))
    return Section("plugins that changed or failed", words.table(rows, right=(0,)))


def _others(found: Sequence[Leg]) -> Section:
    """Return the events that are not the framework's own."""
    known = {event.name for event in CATALOGUE}
    steps: dict[str, list[int]] = {}
    counts: Counter[str] = Counter()
    for leg in found:
        own: Counter[str] = Counter()
        for entry in leg.happenings():
            if entry.event not in known:
                steps.setdefault(entry.event, []).append(entry.place.steps)
                own[entry.event] = entry.data.get("emission", own[entry.event] + 1)  # of many, a sample is recorded
        counts += own
    rows = [(printable(name), words.times(counts[name]), _span(at)) for name, at in steps.items()]
    return Section("events of others", words.table(rows))


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]:,}" + f" to {steps[-1]:,}" * (len(steps) > 1)


def _damage(found: Sequence[Leg]) -> Section:
    said = [f"attempt {leg.number}: {printable(each)}" for leg in found for each in damage_in_short(leg.attempt)]
    return Section("what could not be read", [line for each in said for line in words.lines(each, "  ", "    ")])
