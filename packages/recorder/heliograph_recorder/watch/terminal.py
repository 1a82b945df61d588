"""The watched runs as a text screen."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, Any

from heliograph.spi import printable

from .run_list import RunList

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BARS = "▁▂▃▄▅▆▇█"
PERIOD = 1.0  # seconds between two updates
COLUMNS = 40  # of a curve
CHARTS, ROWS = 8, 5  # of a run: curves; the latest requests and checkpoints
RUNS = 10  # listed: the newest
COLORS = {"running": "blue", "completed": "green", "stopped": "yellow", "failed": "red"}


def show(runs: RunList, *, once: bool = False) -> None:
    """Show the runs until Ctrl-C; once, if the output is not a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once or not sys.stdout.isatty():
        console.print(screen(runs))
        return
    with Live(screen(runs), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(runs), refresh=True)
            sleep(PERIOD)


def screen(runs: RunList) -> Group:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    all_runs = runs.runs()
    chosen = [all_runs[number] for number in runs.first()]
    panels: list[RenderableType] = [
        Panel(Group(*_parts(facts)), title=printable(run.name), title_align="left")
        for run, facts in ((run, run.facts()) for run in chosen)
    ]
    lines = [Text(f"{printable(path)} does not exist yet.") for path in runs.missing()]
    return Group(*_list(runs.rows()), *(panels or ["There is no recording yet."]), *lines)


def _list(rows: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    from rich.text import Text

    if len(rows) < 2:
        return
    rows = sorted(rows, key=lambda row: -row["modified"])
    yield _table(
        (row["name"], "running" if row["running"] else row["status"], _moment(row["modified"])) for row in rows[:RUNS]
    )
    if len(rows) > RUNS:
        yield Text(f"and {len(rows) - RUNS} more runs", style="dim")


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _parts(facts: dict[str, Any]) -> Iterator[RenderableType]:
    from rich.text import Text

    if "error" in facts:
        yield Text(printable(facts["error"]))
        return
    yield Text(printable(f"{facts['run']}: {facts['ended']}"), style=f"bold {COLORS.get(facts['status'], 'magenta')}")
    if facts["parent"] is not None:
        yield Text(printable(facts["parent"]["text"]))
    warnings = *facts["why"], *facts["warnings"], *facts["damage"]
    yield from (Text(printable(warning), style="yellow") for warning in warnings)
    yield Text(printable(" · ".join(f"{name} {value}" for name, value in facts["facts"])))
    if facts["goodput"] is not None:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts["parts"])
        yield Text(f"goodput {facts['goodput']:.1%}: {spent}")
    yield from (Text(printable(f"{kind}: {text}"), style="yellow") for kind, text in facts["findings"])
    curves = [curve for chart in facts["charts"] for curve in chart["curves"]]
    yield _table(_curve(curve) for curve in curves[:CHARTS])
    if len(curves) > CHARTS:
        yield Text(f"and {len(curves) - CHARTS} more curves", style="dim")
    yield _table((verb, f"{times}x", by, when, why) for verb, times, by, _, when, why, _ in facts["requests"][-ROWS:])
    yield _table((f"step {step}", name, role) for step, _, name, role, *_ in facts["checkpoints"][-ROWS:])


def _table(rows: Iterable[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _curve(curve: dict[str, Any]) -> tuple[str, str, str]:
    """Return a curve's name, sparkline and last value, without the points that a resume or roll-back discarded."""
    values = [value for piece in curve["pieces"] if not piece["lost"] for value in piece["y"]]
    last = "" if not values else f"{values[-1]:.6g}" if isinstance(values[-1], float) else str(values[-1])
    return curve["metric"], sparkline([value for value in values if isinstance(value, float)]), last


def sparkline(values: Sequence[float], columns: int = COLUMNS) -> str:
    """Return a row of bars, each for the mean of a stretch of values."""
    if not values:
        return ""
    count = min(columns, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
