"""A table of what was logged, for spreadsheets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...core.system.numbered_files import file_path, find_numbered, is_text, make_numbered, name_other
from ...events import Run
from .csv_sheet import Row, Sheet, last_row
from .records import AXES, Page, Place
from .tracker import Tracker

HEAD: Final = (*AXES, "training")
NEVER: Final = (-1, -1)


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
        """Say where rows are written."""
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
        """Close the file, also where it could not be finished."""
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
