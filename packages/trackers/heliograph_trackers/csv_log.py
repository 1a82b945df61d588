"""A table of the logged metrics, for spreadsheets."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from heliograph import Run
from heliograph.builtin_callbacks.trackers import AXES
from heliograph.core.system.numbered_files import file_path, find_numbered, is_text, make_numbered, name_other
from heliograph.spi import Page, Place, Tracker

HEAD: Final = (*AXES, "training")
NEVER: Final = (-1, -1)
Row = dict[str, str]
END: Final = b"\n"


class CSVLog(Tracker):
    """Write metrics to a CSV file: one row for each step with logged metrics.

    The first columns are the position: `step`, `epoch`, `samples`, `seconds`, the `attempt` (from 1, increased at each
    resume), `rollbacks` (how often the run has rolled back) and `training`, which is equal in all attempts. Each metric
    has a column; a new metric adds one, with empty fields in earlier rows. Metrics of several events at the same step
    are in one row. NaN is written as `nan`, infinity as `inf`.

    A file of another training is never changed: if `log.csv` contains one, a new training writes `log-2.csv` and notes
    this in the result. A resumed training continues its own file, after removing the rows that were written after its
    checkpoint. Rows that could not be written are counted in a warning. The table does not show how the run ended.

    Args:
        path: the file; its folder is created if it does not exist.
    """

    patience = 2.0  # a disk responds immediately unless it is full
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
        """Create a file, or continue the training's file up to its checkpoint."""
        self._close_sheet()
        name, _, training = (page.id or "").rpartition(":")
        self._training = training or page.training_id[:8]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        existing = self._file_of_training(name)
        path = existing or make_numbered(self.path)
        if existing is None and path != self.path:
            self._remark(name_other(self.path, path))
        self._sheet, self._reached = Sheet(path), NEVER
        if page.resumed_at is not None:
            limit = (self._held_rollbacks, page.resumed_at)
            self._sheet.keep(lambda row: _key(row)[0] < limit[0] or _key(row) <= limit)
            self._reached = _key(self._sheet.last)
        return f"{path.name}:{self._training}"

    def write_scalars(self, place: Place, values: Mapping[str, float]) -> None:
        """Write a row, or add fields to the last row if it has the same step."""
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

    def _file_of_training(self, made: str) -> Path | None:
        for path in filter(is_text, find_numbered(self.path)):
            last = last_row(path)
            if last.get("training") == self._training or (path.name == made and not last and _is_begun(path)):
                return path
        return None


def _is_begun(path: Path) -> bool:
    head, content = ",".join(HEAD).encode(), path.read_bytes()
    return content[: len(head)] == head[: len(content)]


def _key(row: Row) -> tuple[int, int]:
    return (int(row["rollbacks"]), int(row["step"])) if row else NEVER


class Sheet:
    """An open file whose first line contains the names of the columns.

    Opening removes a line that was truncated by a kill.

    Args:
        path: an existing file; an empty one has no columns yet.

    Attributes:
        columns: the names of the columns, in order.
        last: the last row; empty if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("r+b", buffering=0)
        content = path.read_bytes()
        complete = content[: content.rfind(END) + 1]
        if complete != content:
            self._file.truncate(len(complete))
        self._end, self._last_at = len(complete), complete.rfind(END, 0, -1) + 1
        self.columns, *rows = _parse(complete) or [[]]
        self.last: Row = dict(zip(self.columns, rows[-1], strict=False)) if rows else {}

    def append(self, row: Row) -> None:
        self._widen(row)
        self._write(self._end, self._line(row))
        self.last = row

    def extend_last(self, values: Row) -> None:
        """Add or replace values in the last row."""
        self._widen(values)
        row = self.last | values
        line = self._line(row)
        if len(line) < self._end - self._last_at:  # another value, with fewer digits
            self._rewrite(self.columns, [*self._rows()[:-1], row])
        else:
            self._write(self._last_at, line)
        self.last = row

    def keep(self, is_kept: Callable[[Row], bool]) -> None:
        rows = self._rows()
        remaining = [row for row in rows if is_kept(row)]
        if len(remaining) < len(rows):
            self._rewrite(self.columns, remaining)

    def close(self) -> None:
        self._file.close()

    def _rows(self) -> list[Row]:
        return [dict(zip(self.columns, row, strict=False)) for row in _parse(self.path.read_bytes())[1:]]

    def _widen(self, values: Mapping[str, str]) -> None:
        if new := [name for name in values if name not in self.columns]:
            self._rewrite([*self.columns, *new], self._rows())

    def _rewrite(self, columns: list[str], rows: list[Row]) -> None:
        aside = self.path.with_name(self.path.name + ".tmp")
        lines = [_joined(columns), *(_joined(row.get(name, "") for name in columns) for row in rows)]
        try:
            aside.write_bytes(b"".join(lines))
            aside.replace(self.path)
        except OSError:
            aside.unlink(missing_ok=True)  # frees space on a full disk
            raise
        self._file.close()
        self._file = self.path.open("r+b", buffering=0)
        self.columns, self.last = columns, rows[-1] if rows else {}
        self._end = sum(map(len, lines))
        self._last_at = self._end - len(lines[-1])

    def _line(self, row: Row) -> bytes:
        return _joined(row.get(name, "") for name in self.columns)

    def _write(self, at: int, line: bytes) -> None:
        previous = b"" if at == self._end else os.pread(self._file.fileno(), self._end - at, at)
        try:
            self._put(at, line)
        except OSError:
            self._put(at, previous)
            self._file.truncate(at + len(previous))
            raise
        self._last_at, self._end = at, at + len(line)

    def _put(self, at: int, line: bytes) -> None:
        written = 0
        while written < len(line):
            written += os.pwrite(self._file.fileno(), line[written:], at + written)


def last_row(path: Path) -> Row:
    """Return the last complete row of a file; empty if there is none."""
    content = path.read_bytes()
    header, *rows = _parse(content[: content.rfind(END) + 1]) or [[]]
    return dict(zip(header, rows[-1], strict=False)) if rows else {}


def _parse(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode("utf-8", errors="replace"), newline="")))


def _joined(fields: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)  # type: ignore[arg-type]
    return text.getvalue().encode()
