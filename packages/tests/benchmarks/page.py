"""The figures on docs/developers/benchmarks.md, between two marks, and the charts of other pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from heliograph.packages.tests.benchmarks.chart import draw
from heliograph.packages.tests.benchmarks.first import CONTROL, OURS, PEERS, missing_peers
from heliograph.packages.tests.benchmarks.measure import Comparison, Conditions, Line, Loop, Measured
from heliograph.packages.tests.benchmarks.report import BUSY, Found, not_held

DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURE = DOCS / "developers/benchmarks.md", DOCS / "images/performance.svg"
README_PICTURE, README_ROW = DOCS / "images/overhead.svg", "usual set"
BEGIN = "<!-- figures: written by `python packages/tests/benchmarks/bench.py --page` -->\n"
END = "<!-- end of the figures -->\n"
WIDTH = 92  # of a line that the site shows without scrolling
Cells = list[str]


def write_page(found: Found, page: Path = PAGE, picture: Path = PICTURE, readme_picture: Path = README_PICTURE) -> None:
    """Replace the figures of the page, the chart of the page on performance, and the chart of the README."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} lacks the lines between which the figures are: {BEGIN.strip()} and {END.strip()}")
    page.write_text(before + begin + figures_of(found) + end + after, encoding="utf-8")
    draw(found.first, picture)
    draw_readme(found.first, readme_picture)


def draw_readme(rows: Iterable[Comparison], path: Path) -> None:
    """Draw the row of the usual set, with no bar cut."""
    (row,) = [row for row in rows if row.name == README_ROW]
    draw([row], path, longest=max(loop.beyond.middle for loop in row.loops.values()))


def figures_of(found: Found) -> str:
    """Return the part of the page that is written."""
    parts = [
        conditions_in_words(found.conditions),
        markdown(first_table(found.first)),
        *(f"{peer} was not installed." for peer in missing_peers()),
        missed(found),
        *(section(table) for table in found.tables),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def conditions_in_words(conditions: Conditions) -> str:
    """Return what the figures depend on."""
    measured = "with `--quick`, fewer rounds in one process," if conditions.quick else "as described above"
    text = (
        f"Measured {measured} on {conditions.date}: {conditions.cores} cores, {conditions.gpu}, load {conditions.load} "
        f"at the start; Python {conditions.python}, torch {conditions.torch}, one thread for each process."
    )
    return f"{text} **{BUSY}**" if conditions.is_busy() else text


def first_table(rows: Iterable[Comparison]) -> list[Cells]:
    """Return the cells of the first table."""
    table = [["", "by hand", CONTROL, OURS, "bar", *PEERS]]
    for row in rows:
        control, ours, *peers = (row.loops.get(name) for name in (CONTROL, OURS, *PEERS))
        hand = f"{row.loops[OURS].hand:.0f} µs"
        table.append(
            [row.name, hand, cell(control), f"**{cell(ours)}**", verdict(row.bar, row.held), *map(cell, peers)]
        )
    return table


def section(table: Measured) -> str:
    """Return another table with its title."""
    rows = f"not measured: {table.absent}" if table.absent else columns([cells(line) for line in table.lines])
    note = fill(f"--only {table.name}: {table.note}", WIDTH)
    return f"### {table.title}\n\n```text\n{note}\n\n{rows}\n```"


def cells(line: Line) -> Cells:
    """Return the cells of a row."""
    bar = "" if line.held is None else f"{line.bar:g}" + ("" if line.held else " missed")
    return [line.name, f"{line.figure.middle:.{line.digits}f}", bar]


def columns(rows: list[Cells]) -> str:
    """Return rows of a name, a median and a bar as aligned text."""
    rows = [["", "median", "bar"], *rows]
    width, digits = (max(len(row[index]) for row in rows) for index in (0, 1))
    return "\n".join(f"{name:<{width}}  {middle:>{digits}}  {bar}".rstrip() for name, middle, bar in rows)


def cell(loop: Loop | None) -> str:
    """Return a loop in a cell of the first table."""
    return "" if loop is None else f"{loop.ratio.middle:.2f} ({loop.beyond.middle:+.1f})"


def verdict(bar: str, held: bool | None) -> str:
    """Return a bar, and that it was not held."""
    return bar if held else f"{bar}, **not held**"


def missed(found: Found) -> str:
    """Return how many bars were not held."""
    missed = not_held(found)
    return f"Bars that were not held: {len(missed)}, marked in the tables." if missed else "Every bar was held."


def markdown(rows: list[Cells]) -> str:
    """Return a table."""
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *rest])
