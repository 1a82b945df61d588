"""A table of what was logged, for spreadsheets."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ...core.system.numbered_files import file_path, find_numbered, is_text, make_numbered, name_other
from ...events import Run
from .tracker import AXES, Page, Place, Tracker

HEAD: Final = (*AXES, "training")
NEVER: Final = (-1, -1)
Row = dict[str, str]
END: Final = b"\n"


class CSVLog(Tracker):
    """Write metrics to a file of comma-separated values: a row for each step at which something was logged.

    The first columns say where that was: `step`, `epoch`, `samples`, `seconds`, the `attempt` (from 1, one more at each
    resume), `rollbacks` (how often the run had gone back by then) and `training`, the same in all attempts. Each metric
    has a column; one that comes later is added to the file, with empty fields above. What several events log at a step
    is in one row. NaN is `nan`, infinity `inf`.

    A file of another training is never touched: where `log.csv` holds one, a fresh fit writes `log-2.csv`, and notes
    that in the result. A resumed one continues its own file, and first removes the rows that were written after its
    checkpoint. Rows that could not be written are counted in a warning. How the run ended is not in the table.

    Args:
        path: the file; its folder is made where it is missing.
    """

    patience = 2.0  # a disk answers at once, or it is full
    is_local = True

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = file_path(path, "CSVLog", "log.csv")
        self.exclusive = (f"the log {self.path.absolute()}",)
        self._sheet: Sheet | None = None
        self._training = ""
        self._reached = NEVER  # the last row of a file that is continued

    def describe(self, run: Run) -> str:
        return f"logs to {self.path}"

    def open(self, page: Page) -> str:
        """Begin a file, or continue that of the training, without what was written after its checkpoint."""
        self._close_sheet()
        name, _, training = (page.id or "").rpartition(":")
        self._training = training or page.training_id[:8]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        own = self._own(name)
        path = own or make_numbered(self.path)
        if own is None and path != self.path:
            self._remark(name_other(self.path, path))
        self._sheet, self._reached = Sheet(path), NEVER
        if page.resumed_at is not None:
            limit = (self._held_rollbacks, page.resumed_at)
            self._sheet.keep(lambda row: _key(row)[0] < limit[0] or _key(row) <= limit)
            self._reached = _key(self._sheet.last)
        return f"{path.name}:{self._training}"

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Write a row, or further fields of the last one where that is of the same step."""
        assert self._sheet is not None, "rows come after open"
        fields = {name: repr(float(value)) for name, value in values.items()}
        key, last = (place.rollbacks, place.step), self._sheet.last
        is_repeated = key <= self._reached
        fits = is_repeated or all(last.get(name) in (None, "", text) for name, text in fields.items())
        if last and key == _key(last) and fits:
            self._sheet.extend_last(fields)
        elif not is_repeated:
            self._sheet.append(self._head(place) | fields)

    def finish(self, status: str) -> None:
        """Close the file."""
        self._close_sheet()

    def close(self) -> None:
        super().close()
        self._close_sheet()

    def _close_sheet(self) -> None:
        if self._sheet is not None:
            self._sheet.close()
            self._sheet = None

    def _head(self, place: Place) -> Row:
        values: dict[str, Any] = {name: getattr(place, name) for name in HEAD[:-1]}
        return {name: str(value) for name, value in values.items()} | {
            "seconds": f"{place.seconds:.3f}",
            "training": self._training,
        }

    def _own(self, made: str) -> Path | None:
        """Return the file of this training: one that holds rows of it, or that it has made and not written to yet."""
        for path in filter(is_text, find_numbered(self.path)):
            last = last_row(path)
            if last.get("training") == self._training or (path.name == made and not last and _is_begun(path)):
                return path
        return None


def _is_begun(path: Path) -> bool:
    """Return whether a file is empty, or has at least the beginning of a table's first line."""
    head, content = ",".join(HEAD).encode(), path.read_bytes()
    return content[: len(head)] == head[: len(content)]


def _key(row: Row) -> tuple[int, int]:
    return (int(row["rollbacks"]), int(row["step"])) if row else NEVER


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
