"""A file of comma-separated values that grows by rows and columns, and is whole after every kill."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

Row = dict[str, str]
END: Final = b"\n"


class Sheet:
    """An open file whose first line names the columns.

    A line that a kill cut short is removed when it is opened.

    Args:
        path: an existing file; an empty one has no columns yet.

    Attributes:
        columns: their names, in order.
        last: the last row; empty where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("r+b", buffering=0)
        content = path.read_bytes()
        whole = content[: content.rfind(END) + 1]
        if whole != content:
            self._file.truncate(len(whole))
        self._end, self._last_at = len(whole), whole.rfind(END, 0, -1) + 1
        self.columns, *rows = _parse(whole) or [[]]
        self.last: Row = dict(zip(self.columns, rows[-1], strict=False)) if rows else {}

    def append(self, row: Row) -> None:
        """Write a row below the others; columns that are new come last."""
        self._widen(row)
        self._write(self._end, self._line(row))
        self.last = row

    def extend_last(self, values: Row) -> None:
        """Write further values into the last row, or others in the place of its own."""
        self._widen(values)
        row = self.last | values
        line = self._line(row)
        if len(line) < self._end - self._last_at:  # another value, with fewer digits
            self._rewrite(self.columns, [*self._rows()[:-1], row])
        else:
            self._write(self._last_at, line)
        self.last = row

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        """Remove rows, if there are such."""
        rows = self._rows()
        kept = [row for row in rows if is_kept(row)]
        if len(kept) < len(rows):
            self._rewrite(self.columns, kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rows(self) -> list[Row]:
        return [dict(zip(self.columns, row, strict=False)) for row in _parse(self.path.read_bytes())[1:]]

    def _widen(self, values: Mapping[str, str]) -> None:
        if new := [name for name in values if name not in self.columns]:
            self._rewrite([*self.columns, *new], self._rows())

    def _rewrite(self, columns: list[str], rows: list[Row]) -> None:
        """Replace the file by one with these columns and rows: whoever looks at it sees the old one or the new one."""
        aside = self.path.with_name(self.path.name + ".tmp")
        lines = [_joined(columns), *(_joined(row.get(name, "") for name in columns) for row in rows)]
        try:
            aside.write_bytes(b"".join(lines))
            aside.replace(self.path)
        except OSError:
            aside.unlink(missing_ok=True)  # a full disk needs its room
            raise
        self._file.close()
        self._file = self.path.open("r+b", buffering=0)
        self.columns, self.last = columns, rows[-1] if rows else {}
        self._end = sum(map(len, lines))
        self._last_at = self._end - len(lines[-1])

    def _line(self, row: Row) -> bytes:
        return _joined(row.get(name, "") for name in self.columns)

    def _write(self, at: int, line: bytes) -> None:
        """Write the last line, which is not shorter than before; where that fails, leave the file as it was."""
        former = b"" if at == self._end else os.pread(self._file.fileno(), self._end - at, at)
        try:
            self._put(at, line)
        except OSError:
            self._put(at, former)
            self._file.truncate(at + len(former))
            raise
        self._last_at, self._end = at, at + len(line)

    def _put(self, at: int, line: bytes) -> None:
        written = 0
        while written < len(line):
            written += os.pwrite(self._file.fileno(), line[written:], at + written)


def last_row(path: Path) -> Row:
    """Return the last whole row of a file, which is not touched; nothing where there is none."""
    content = path.read_bytes()
    header, *rows = _parse(content[: content.rfind(END) + 1]) or [[]]
    return dict(zip(header, rows[-1], strict=False)) if rows else {}


def _parse(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode("utf-8", errors="replace"), newline="")))


def _joined(fields: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)  # type: ignore[arg-type]
    return text.getvalue().encode()
