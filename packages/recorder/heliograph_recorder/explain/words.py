"""Numbers, durations, positions, tables and sections as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from ..format.records import Counters

WIDTH = 100  # columns
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class Section:
    """A title of a story with its lines; one without lines is left out."""

    title: str
    lines: list[str]


def join_sections(sections: Iterable[Section]) -> str:
    return "\n\n".join("\n".join([each.title, *each.lines]) for each in sections if each.lines)


def count_things(number: int, thing: str, things: str = "") -> str:
    return f"{number:,} {thing if number == 1 else things or _plural(thing)}"


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
            whole, rest = divmod(round(value / part), size // part)
            return f"{whole} {unit}" + f" {rest} {smaller}" * bool(rest)
    raise AssertionError(value)


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""


def number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def position(at: Counters) -> str:
    return f"epoch {at.epoch}, batch {at.batch}, step {at.steps}"


def join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def lines(text: str, first: str = "  ", rest: str | None = None) -> list[str]:
    rest = " " * len(first) if rest is None else rest
    broken = wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace(NO_BREAK, " ") for line in broken]


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
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
        head = "  " + "  ".join(cells)
        wrapped += lines(row[-1], head + "  ", " " * min(len(head) + 2, 60)) if row[-1] else [head.rstrip()]
    return wrapped


def _plural(thing: str) -> str:
    return thing + ("es" if thing.endswith(("ch", "s", "x")) else "s")
