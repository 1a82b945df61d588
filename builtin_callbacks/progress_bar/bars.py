"""Bars in a terminal or a notebook. They go when the run is over, and leave its end as text."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ...core.system.extras import printable, require
from ...events import Run
from ...events.catalogue import Status
from . import text
from .text import Pace, duration

NAME = 20  # columns of a run's name beside a bar
EPOCHS = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
BATCHES = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
INDENT = 2
MEASURED = INDENT * " " + "{desc}"  # below the bar of the steps, which has no room for it


class Bars:
    """A bar of the epochs and one of the batches, or one of the steps; and one of a validation or test.

    Args:
        tqdm: the class.
        file: where to; None is standard error.
        interval: the least seconds between two redraws.
        metrics: the names of the metrics beside the bars; None shows the losses and the validation's.
    """

    size: Mapping[str, Any] = {"dynamic_ncols": True}

    def __init__(self, tqdm: Any, file: Any, interval: float, metrics: Sequence[str] | None) -> None:
        self._tqdm, self._file, self._interval, self._names = tqdm, file, interval, metrics
        self._epochs: Any = None
        self._batches: Any = None
        self._measured: Any = None
        self._passing: Any = None
        self._before_epoch = 0
        self._metrics: dict[str, float] = {}
        self._pace: Pace | None = None

    def begin_epoch(self, run: Run) -> None:
        """Begin the bar of the batches."""
        self._before_epoch = run.progress.batches - run.progress.batch
        self._pace = self._pace or Pace(run)
        self.advance(run)

    def measure(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Keep metrics for the next time that the bars are drawn."""
        self._metrics.update(metrics)

    def advance(self, run: Run) -> None:
        """Move the bars to where the run is."""
        self._draw(run)
        self._drawn()

    def end_epoch(self, run: Run) -> None:
        """Fill the bar of the batches, and move that of the epochs."""
        self._draw(run, finished=True)
        if run.max_steps is None and self._batches is not None:
            self._batches.close()
            self._batches = None
        self._drawn()

    def begin_replay(self, run: Run, total: int) -> None:
        """Begin the bar of the batches that are read again."""
        self.begin_pass(run, "read again", total)

    def begin_pass(self, run: Run, what: str, total: int | None) -> None:
        """Begin a bar that goes when what it shows is done."""
        self._passing = self._bar(BATCHES, total=total, desc=what, unit="batch")
        self._drawn()

    def advance_pass(self, done: int) -> None:
        """Move it."""
        if self._passing is not None and self._passing.update(done - self._passing.n):
            self._drawn()

    def end_pass(self, run: Run) -> None:
        """Remove it."""
        if self._passing is not None:
            self._passing.close()
            self._passing = None
            self._drawn()

    def announce(self, run: Run, line: str) -> None:
        """Write a line above the bars."""
        self._write([f"{run.name}  {line}"])

    def show(self, lines: Sequence[str]) -> None:
        """Write lines above the bars."""
        self._write(lines)

    def restart(self) -> None:
        """Remove the bars, and forget the metrics."""
        for bar in self._rows()[::-1]:
            bar.close()
        self._epochs = self._batches = self._measured = self._passing = self._pace = None
        self._metrics = {}

    def finish(self, run: Run, status: Status) -> None:
        """Write how the run ended in place of its bars."""
        width = self._columns()
        speed = [] if self._pace is None else self._pace.whole(run)
        facts = [run.name, *text.position(run), duration(run.progress.seconds), *speed]
        metrics = text.limited(text.values(text.in_order(self._metrics)))
        self.restart()
        verdict = text.broken(f"{run.name}  {text.verdict(run, status)}", width)
        self._write([*text.joined([*facts, *metrics], width), *verdict, *text.warnings(run, width)])

    def close(self) -> None:
        """Remove the bars."""
        self.restart()

    def _rows(self) -> list[Any]:
        return [bar for bar in (self._epochs, self._batches, self._measured, self._passing) if bar is not None]

    def _write(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._tqdm.write(printable(line), file=self._file or sys.stderr)

    def _columns(self) -> int:
        return columns(self._file or sys.stderr) or text.WIDTH

    def _drawn(self) -> None:
        """Do what is to be done when bars have changed."""

    def _bar(self, form: str, **options: Any) -> Any:
        if options.get("total") or form == MEASURED:  # of an unknown length, tqdm's own form is without a bar
            options["bar_format"] = form
        return self._tqdm(file=self._file, mininterval=self._interval, leave=False, **self.size, **options)

    def _draw(self, run: Run, *, finished: bool = False) -> None:
        """Make the bars that are missing, and move them."""
        metrics = self._chosen(run)
        of_validation = {name: value for name, value in metrics.items() if name.startswith("validation/")}
        others = {name: value for name, value in metrics.items() if name not in of_validation}
        if run.max_steps is not None:
            self._draw_steps(run, others, of_validation)
        else:
            self._draw_epochs(run, others, of_validation, finished=finished)

    def _draw_steps(self, run: Run, beside: Mapping[str, float], below: Mapping[str, float]) -> None:
        steps = run.progress.steps
        if self._batches is None:
            facts = {"total": run.max_steps, "initial": steps, "unit": "step", "desc": _short(run.name)}
            self._batches = self._bar(BATCHES, position=0, **facts)
        _move(self._batches, steps, beside)
        if below and self._measured is None:
            self._measured = self._bar(MEASURED, position=1)
        if below:
            room = (self._measured.format_dict["ncols"] or text.WIDTH) - INDENT
            if (line := text.fitted(below, room)) != self._measured.desc:
                self._measured.set_description_str(line)

    def _draw_epochs(
        self, run: Run, beside: Mapping[str, float], of_validation: Mapping[str, float], *, finished: bool
    ) -> None:
        progress = run.progress
        if self._epochs is None:
            facts = {
                "total": run.max_epochs,
                "initial": progress.epoch,
                "unit": "epoch",
                "desc": "epochs ",
                "smoothing": 0,
            }
            self._epochs = self._bar(EPOCHS, position=0, **facts)
        if self._batches is None and not finished:
            facts = {"total": run.batches_per_epoch, "initial": progress.batch, "unit": "batch", "desc": "batches"}
            self._batches = self._bar(BATCHES, position=1, **facts)
        if self._batches is not None:
            _move(self._batches, progress.batches - self._before_epoch, beside)
        _move(self._epochs, progress.epoch, of_validation)

    def _chosen(self, run: Run) -> dict[str, float]:
        if self._names is not None:
            return {name: self._metrics[name] for name in self._names if name in self._metrics}
        losses = {f"train/{run.label('loss', name)}" for name in run.optimizers}
        chosen = {n: value for n, value in self._metrics.items() if n in losses or n.startswith("validation/")}
        return text.in_order(chosen)


def _move(bar: Any, place: int, metrics: Mapping[str, float]) -> None:
    """Move a bar, with as many metrics beside it as leave ten columns for the bar itself."""
    beside = ""
    if metrics:
        facts = bar.format_dict
        used = len(bar.format_meter(**{**facts, "postfix": None, "ncols": None}))
        beside = text.fitted(metrics, (facts["ncols"] or text.WIDTH) - used - len(", "))
    bar.set_postfix_str(beside, refresh=False)
    bar.update(place - bar.n)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def columns(file: TextIO) -> int | None:
    """Return the width of a terminal: 0 if it has no size, as in some containers; None if that is unknown."""
    try:
        size = os.get_terminal_size(file.fileno())
        return size.columns if size.lines else 0
    except (OSError, ValueError, AttributeError):  # a replaced stream
        return None


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
