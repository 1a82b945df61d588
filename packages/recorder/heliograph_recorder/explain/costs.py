"""The time of a recorded run in each plugin on each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heliograph.spi import printable

from ..format.records import HandlerTime, TimesEntry
from . import words
from .attempt_summary import AttemptSummary
from .words import StorySection

TOP_PLUGINS = 3  # named in the short text


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one plugin's handlers of one event, in all attempts.

    Attributes:
        plugin: the plugin's name.
        event: the event's name.
        seconds: the time in all emissions.
        emissions: the number of emissions.
        longest: the seconds of the longest timed call.
        is_estimate: whether only some emissions were timed.
    """

    plugin: str
    event: str
    seconds: float
    emissions: int
    longest: float
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class PluginCost:
    """The time of one plugin's handlers, in total and on each event, the longest first."""

    plugin: str
    seconds: float
    is_estimate: bool
    events: tuple[Cost, ...]


def costs(attempts: Sequence[AttemptSummary]) -> list[Cost]:
    rows: dict[tuple[str, str], list[HandlerTime]] = {}
    for attempt in attempts:
        times = next((entry for entry in reversed(attempt.attempt.entries) if isinstance(entry, TimesEntry)), None)
        for row in times.rows if times is not None else ():
            rows.setdefault((row.plugin, row.event), []).append(row)
    merged = [
        Cost(
            plugin,
            event,
            sum(row.estimate for row in parts),
            sum(row.emissions for row in parts),
            max(row.longest for row in parts),
            any(row.timed < row.emissions for row in parts),
        )
        for (plugin, event), parts in rows.items()
    ]
    return sorted(merged, key=lambda cost: -cost.seconds)


def by_plugin(rows: Sequence[Cost]) -> list[PluginCost]:
    plugins: dict[str, list[Cost]] = {}
    for row in rows:
        plugins.setdefault(row.plugin, []).append(row)
    totals = [
        PluginCost(name, sum(row.seconds for row in parts), any(row.is_estimate for row in parts), tuple(parts))
        for name, parts in plugins.items()
    ]
    return sorted(totals, key=lambda cost: -cost.seconds)


def timed_seconds(attempts: Sequence[AttemptSummary]) -> float:
    """Return the wall time in which handlers were timed; a killed attempt may have no recorded times."""
    return sum(attempt.timed_seconds for attempt in attempts)


def untimed_attempts(attempts: Sequence[AttemptSummary]) -> list[int]:
    return [attempt.number for attempt in attempts if not attempt.timed_seconds]


def costs_section(plugins: Sequence[PluginCost], wall: float, untimed: Sequence[int] = ()) -> StorySection:
    if not plugins:
        return StorySection("time in plugins", [])
    rows = [
        ("~" * cost.is_estimate + words.seconds(cost.seconds), words.share(cost.seconds, wall), *_cells(cost))
        for cost in plugins
    ]
    lines = words.table(rows, right=(0, 1))
    if any(cost.is_estimate for cost in plugins):
        lines += words.lines("~ estimated: the events of every batch were timed in some batches only")
    if untimed:
        numbers = words.join_words([str(number) for number in untimed])
        lines += words.lines(f"no times are recorded for attempt{'s' * (len(untimed) > 1)} {numbers}")
    return StorySection(f"time in plugins: {_total(plugins)} of {words.seconds(wall)}", lines)


def costs_in_short(plugins: Sequence[PluginCost], wall: float) -> str:
    if not plugins:
        return "no plugin times are recorded"
    top = [f"{printable(cost.plugin)} {words.seconds(cost.seconds)}" for cost in plugins[:TOP_PLUGINS]]
    return f"plugins took {_total(plugins)} of {words.seconds(wall)}: {', '.join(top)}"


def _total(plugins: Sequence[PluginCost]) -> str:
    about = "about " if any(cost.is_estimate for cost in plugins) else ""
    return about + words.seconds(sum(cost.seconds for cost in plugins))


def _cells(cost: PluginCost) -> tuple[str, str]:
    if not cost.events:
        return printable(cost.plugin), ""
    top, slowest = cost.events[0], max(cost.events, key=lambda event_cost: event_cost.longest)
    events = f"on {top.event}" if len(cost.events) == 1 else f"mostly on {top.event}"
    longest = f"longest {words.seconds(slowest.longest)}" + f" on {slowest.event}" * (slowest is not top)
    return printable(cost.plugin), f"{events}, {longest}"
