"""Where the time of a recorded run went: in which plugin, on which event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....core.system.extras import printable
from ..format.records import Spending, Spent
from . import words
from .attempt_summary import Leg
from .sections import Section

MOST = 3  # plugins that are named in short


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of one plugin's handlers of one event, in all attempts.

    Attributes:
        plugin: whose.
        event: the event's name.
        seconds: in all emissions.
        emissions: how many there were.
        longest: seconds of the longest that was timed.
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
    """The time of one plugin's handlers.

    Attributes:
        plugin: whose.
        seconds: in all.
        is_estimate: whether only some of its handlers' calls were timed.
        events: what it spent on each event, the most first.
    """

    plugin: str
    seconds: float
    is_estimate: bool
    events: tuple[Cost, ...]


def costs(found: Sequence[Leg]) -> list[Cost]:
    """Return the time of every plugin on every event, the most first."""
    rows: dict[tuple[str, str], list[Spending]] = {}
    for leg in found:
        spent = next((entry for entry in reversed(leg.attempt.entries) if isinstance(entry, Spent)), None)
        for row in spent.rows if spent is not None else ():
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
    """Return the time of every plugin, the most first."""
    plugins: dict[str, list[Cost]] = {}
    for row in rows:
        plugins.setdefault(row.plugin, []).append(row)
    summed = [
        PluginCost(name, sum(row.seconds for row in parts), any(row.is_estimate for row in parts), tuple(parts))
        for name, parts in plugins.items()
    ]
    return sorted(summed, key=lambda cost: -cost.seconds)


def timed_seconds(found: Sequence[Leg]) -> float:
    """Return the wall time that the recorded times of handlers are of; a killed attempt may have left none."""
    return sum(leg.timed for leg in found)


def untimed(found: Sequence[Leg]) -> list[int]:
    """Return the numbers of the attempts that left no times."""
    return [leg.number for leg in found if not leg.timed]


def costs_section(plugins: Sequence[PluginCost], wall: float, untold: Sequence[int] = ()) -> Section:
    """Return a table of the time in each plugin's handlers.

    Args:
        plugins: the most first.
        wall: the seconds that they were measured in.
        untold: the numbers of attempts that left no times.
    """
    if not plugins:
        return Section("time in plugins", [])
    rows = [
        ("~" * each.is_estimate + words.seconds(each.seconds), words.share(each.seconds, wall), *_cells(each))
        for each in plugins
    ]
    told = words.table(rows, right=(0, 1))
    if any(each.is_estimate for each in plugins):
        told += words.lines("~ an estimate: of the events of every batch, only some were timed")
    if untold:
        numbers = words.listed([str(number) for number in untold])
        told += words.lines(f"of attempt{'s' * (len(untold) > 1)} {numbers} no times are recorded")
    return Section(f"time in plugins: {_total(plugins)} of {words.seconds(wall)}", told)


def costs_in_short(plugins: Sequence[PluginCost], wall: float) -> str:
    """Return the time in all plugins, and those that took the most."""
    if not plugins:
        return "no plugin's time is recorded"
    most = [f"{printable(each.plugin)} {words.seconds(each.seconds)}" for each in plugins[:MOST]]
    return f"plugins took {_total(plugins)} of {words.seconds(wall)}: {', '.join(most)}"


def _total(plugins: Sequence[PluginCost]) -> str:
    about = "about " if any(each.is_estimate for each in plugins) else ""
    return about + words.seconds(sum(each.seconds for each in plugins))


def _cells(cost: PluginCost) -> tuple[str, str]:
    if not cost.events:
        return printable(cost.plugin), ""
    top, slowest = cost.events[0], max(cost.events, key=lambda each: each.longest)
    where = f"on {top.event}" if len(cost.events) == 1 else f"mostly on {top.event}"
    longest = f"longest {words.seconds(slowest.longest)}" + f" on {slowest.event}" * (slowest is not top)
    return printable(cost.plugin), f"{where}, {longest}"
