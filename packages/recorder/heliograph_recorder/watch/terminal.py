"""The runs as a text screen, for those without a browser."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from time import sleep
from typing import TYPE_CHECKING, Any

from heliograph.spi import printable, require

from .run_list import RunList
from .watched_run import WatchedRun

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

BARS = "▁▂▃▄▅▆▇█"
PERIOD = 1.0  # seconds between two pictures
COLUMNS = 40  # of a curve
CHARTS, ROWS = 8, 5  # shown of a run: curves; requests and checkpoints, the latest
RUNS = 10  # listed, the newest
COLORS = {"running": "blue", "completed": "green", "stopped": "yellow", "failed": "red"}


def check_rich() -> None:
    """Check that rich is installed.

    Raises:
        ImportError: it is not.
    """
    require("rich", "watch --terminal", extra="watch")


def show(runs: RunList) -> None:
    """Show the runs, and the newest of each file or folder whole, until Ctrl-C; once, where there is no terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not sys.stdout.isatty():
        console.print(screen(runs))
        return
    with Live(screen(runs), console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(runs), refresh=True)
            sleep(PERIOD)


def screen(runs: RunList) -> Group:
    """Return the picture: a list of several runs, the chosen ones whole, and the paths where there is nothing yet."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    panels: list[RenderableType] = [
        Panel(Group(*_parts(facts)), title=printable(run.name), title_align="left")
        for run, facts in ((run, run.facts()) for run in _chosen(runs))
    ]
    lines = [Text(f"There is nothing at {printable(path)} yet.") for path in runs.missing()]
    return Group(*_list(runs.rows()), *(panels or ["There is no recording yet."]), *lines)


def _list(rows: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """Yield a line for each of several runs, the newest first, with its state and when it was written to."""
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


def _chosen(runs: RunList) -> list[WatchedRun]:
    known = runs.runs()
    return [known[number] for number in runs.first()]


def _parts(facts: dict[str, Any]) -> Iterator[RenderableType]:
    from rich.text import Text

    if "error" in facts:
        yield Text(printable(facts["error"]))
        return
    yield Text(printable(f"{facts['run']}: {facts['ended']}"), style=f"bold {COLORS.get(facts['status'], 'magenta')}")
    if facts["parent"] is not None:
        yield Text(printable(facts["parent"]["text"]))
    yield from (Text(printable(each), style="yellow") for each in (*facts["why"], *facts["warnings"], *facts["damage"]))
    yield Text(printable(" · ".join(f"{name} {value}" for name, value in facts["facts"])))
    if facts["goodput"] is not None:
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts["parts"])
        yield Text(f"goodput {facts['goodput']:.1%}: {spent}")
    yield from (Text(printable(f"{kind}: {text}"), style="yellow") for kind, text in facts["findings"])
    curves = [curve for chart in facts["charts"] for curve in chart["curves"]]
    yield _table(_curve(curve) for curve in curves[:CHARTS])
    left_out = len(curves) - CHARTS
    if left_out > 0:
        yield Text(f"and {left_out} more curves", style="dim")
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
    """Return a curve's name, its picture and its last value; what was lost is left out."""
    values = [value for piece in curve["pieces"] if not piece["lost"] for value in piece["y"]]
    last = "" if not values else f"{values[-1]:.6g}" if isinstance(values[-1], float) else str(values[-1])
    return curve["metric"], sparkline([value for value in values if isinstance(value, float)]), last


def sparkline(values: Sequence[float], columns: int = COLUMNS) -> str:
    """Return the means of as many stretches of values as there are columns, each as a bar."""
    if not values:
        return ""
    count = min(columns, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
