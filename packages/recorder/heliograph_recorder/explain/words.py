"""Format numbers, durations, positions, tables and sections as text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from textwrap import wrap

from ..format.records import Counters

WIDTH = 100  # columns, if the terminal has as many
NARROW = 40
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class StorySection:
    """A section of a story; it is omitted if it has no lines."""

    title: str
    lines: list[str]


def join_sections(sections: Iterable[StorySection]) -> str:
    return "\n\n".join("\n".join([section.title, *section.lines]) for section in sections if section.lines)


def count_things(number: int, thing: str, things: str = "") -> str:
    plural = things or thing + ("es" if thing.endswith(("ch", "s", "x")) else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def seconds(value: float) -> str:
    if value < 0.0001:
        return f"{value * 1e6:.0f} µs"
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms"
    if value < 9.95:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size - part / 2:
            count, remainder = divmod(round(value / part), size // part)
            return f"{count} {unit}" + f" {remainder} {smaller}" * bool(remainder)
    raise AssertionError(value)


def share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total > 0 else ""


def number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def position(at: Counters) -> str:
    return f"epoch {at.epoch}, batch {at.batch}, step {at.steps}"


def join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def width() -> int:
    """Return the number of columns of a text: at most `WIDTH`, and of the terminal."""
    return min(WIDTH, max(NARROW, get_terminal_size().columns)) if sys.stdout.isatty() else WIDTH


def lines(text: str, first: str = "  ", indent: str | None = None) -> list[str]:
    """Break a text into lines of at most `width()` columns; `first` is the indent of the first line."""
    indent = " " * len(first) if indent is None else indent
    broken = wrap(text, width(), initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in broken]


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align rows of cells in columns, the columns `right` to the right; text in the last column is wrapped."""
    rows = list(rows)
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    wrapped = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        head, last = "  " + "  ".join(cells), row[-1]
        if last and len(head) + 2 + len(last) > width() and len(head) > width() * 0.6:  # below it
            wrapped += [head.rstrip(), *lines(last, "    ")]
        else:
            wrapped += lines(last, f"{head}  ", " " * min(len(head) + 2, 60)) if last else [head.rstrip()]
    return wrapped
