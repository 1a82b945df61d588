"""The figures on docs/developers/benchmarks.md, between two marks, and the charts of other pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from heliograph.packages.tests.benchmarks.chart import draw
from heliograph.packages.tests.benchmarks.first import CONTROL, OURS, missing_peers
from heliograph.packages.tests.benchmarks.measure import Comparison, Conditions, Line, Loop, Measured
from heliograph.packages.tests.benchmarks.report import BUSY, FIRST_NAME, Found, not_held

DOCS = Path(__file__).parents[3] / "docs"
PAGE, PICTURE = DOCS / "developers/benchmarks.md", DOCS / "images/performance.svg"
README_PICTURE, README_ROW = DOCS / "images/overhead.svg", "usual set, over any iterable"
BEGIN = "<!-- figures: written by `python packages/tests/benchmarks/bench.py --page` -->\n"
END = "<!-- end of the figures -->\n"
FIRST_NOTE = "µs of a step by hand; then the differences from it, in µs and as a multiple"
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
        block(FIRST_NAME, FIRST_NOTE, columns(first_rows(found.first))),
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


def first_rows(rows: Iterable[Comparison]) -> list[Cells]:
    """Return the rows of the first table; the chart shows the other frameworks."""
    table = [["", "by hand", "again", OURS, "bar"]]
    for row in rows:
        ours, control = row.loops[OURS], row.loops[CONTROL]
        table.append(
            [row.name, f"{ours.hand:.0f}", f"{control.beyond.middle:+.1f}", cell(ours), verdict(row.bar, row.held)]
        )
    return table


def section(table: Measured) -> str:
    """Return another table with its title."""
    rows = [["", "median", "bar"], *(cells(line) for line in table.lines)]
    shown = f"not measured: {table.absent}" if table.absent else columns(rows)
    return f"### {table.title}\n\n{block(table.name, table.note, shown)}"


def block(name: str, note: str, text: str) -> str:
    """Return a table as a block of text."""
    return f"```text\n{fill(f'--only {name}: {note}', WIDTH)}\n\n{text}\n```"


def cells(line: Line) -> Cells:
    """Return the cells of a row."""
    bar = "" if line.held is None else verdict(f"{line.bar:g}", line.held)
    return [line.name, f"{line.figure.middle:.{line.digits}f}", bar]


def cell(loop: Loop) -> str:
    """Return the figures of a loop in the first table."""
    return f"{loop.beyond.middle:+.1f} ({loop.ratio.middle:.2f})"


def verdict(bar: str, held: bool | None) -> str:
    """Return a bar, and that it was missed."""
    return bar if held else f"{bar} missed"


def missed(found: Found) -> str:
    """Return how many bars were missed."""
    missed = not_held(found)
    return f"Missed bars: {len(missed)}, marked in the tables." if missed else "Every bar was held."


def columns(rows: list[Cells]) -> str:
    """Return rows as aligned text, with figures between a name and a bar."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *figures, bar in rows:
        shown = (f"{figure:>{width}}" for figure, width in zip(figures, widths[1:-1], strict=True))
        lines.append("  ".join([f"{name:<{widths[0]}}", *shown, bar]).rstrip())
    return "\n".join(lines)
