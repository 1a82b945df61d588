"""Bars in a notebook: one text that is replaced, so that a saved notebook holds the end of the run and no dead bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.system.extras import printable, require
from ...events import Run
from ...events.catalogue import Status
from . import text
from .bars import Bars


class NotebookBars(Bars):
    """The bars as one output of a cell, which is text and so needs no widgets.

    Args:
        tqdm: the class.
        interval: the least seconds between two redraws.
        metrics: the names of the metrics beside the bars; None shows the losses and the validation's.
    """

    size: Mapping[str, Any] = {"ncols": text.WIDTH}

    def __init__(self, tqdm: Any, interval: float, metrics: Sequence[str] | None) -> None:
        super().__init__(tqdm, _Nowhere(), interval, metrics)
        self._output: Any = None
        self._lines: list[str] = []

    def finish(self, run: Run, status: Status) -> None:
        """Replace the bars by how the run ended."""
        super().finish(run, status)
        self._output, self._lines = None, []

    def close(self) -> None:
        """Remove the bars; what was announced stays."""
        super().close()
        if self._output is not None:
            self._drawn()
        self._output, self._lines = None, []

    def _write(self, lines: Sequence[str]) -> None:
        self._lines += map(printable, lines)
        self._drawn()

    def _columns(self) -> int:
        return text.WIDTH

    def _drawn(self) -> None:
        shown = {"text/plain": "\n".join([*self._lines, *map(str, self._rows())])}
        if self._output is None:
            display = require("IPython.display", "ProgressBar").display
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)


class _Nowhere:
    """A file that keeps nothing: tqdm writes, and the output of the cell is what `str` returns of its bars."""

    encoding = "utf-8"  # or tqdm would draw with ASCII

    def write(self, written: str) -> int:
        return len(written)

    def flush(self) -> None:
        pass
