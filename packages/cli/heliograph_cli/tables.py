"""Tables of the commands, which fit the terminal; a pipe or a file gets all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shutil import get_terminal_size

from heliograph.spi import printable

LEAST = 24  # characters of the last column, before other columns are dropped


def terminal_width() -> int | None:
    """Return the columns of the terminal; None for a pipe or a file."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(rows: Sequence[tuple[str, ...]], *, optional: Sequence[str] = ()) -> str:
    """Return rows below their head as text.

    In a narrow terminal, the columns `optional` are dropped in this order, the first column is shortened in the middle
    to half of the width, and long lines are cut.
    """
    width = terminal_width()
    columns = [[printable(cell) for cell in column] for column in zip(*rows, strict=True)]
    if width is not None:
        columns[0] = [_shortened(cell, width // 2) for cell in columns[0]]
        for name in optional:
            if sum(max(map(len, column)) + 2 for column in columns[:-1]) + LEAST > width:
                columns = [column for column in columns if column[0] != name]
    widths = [max(map(len, column)) for column in columns[:-1]]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in zip(*columns, strict=True)]
    lines = [line if width is None or len(line) <= width else f"{line[: width - 3].rstrip()}..." for line in lines]
    return "\n".join(lines)


def _shortened(text: str, length: int) -> str:
    start = max(1, (length - 3) // 2)
    return text if len(text) <= length else f"{text[:start]}...{text[len(text) + start + 3 - length :]}"
