"""The progress of a run as bars in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.system.extras import require
from ...events import Run, Status
from ...events.checks import printable
from . import texts
from .texts import WIDTH, columns, in_order, metric_texts

NAME = 20  # columns of a run's name next to a bar
EPOCHS = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
BATCHES = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
INDENT = 2
MEASURED = INDENT * " " + "{desc}"  # the metrics of the validation, below the bar of the steps


class Bars:
    """Bars of the epochs and batches, or of the steps, and of evaluations.

    Args:
        tqdm: the class.
        file: the file to write to; None is standard error.
        interval: the minimum number of seconds between two updates.
        metrics: the names of the metrics next to the bars; None shows the losses and the validation's.
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

    def begin_epoch(self, run: Run) -> None:
        self._before_epoch = run.progress.batches - run.progress.batch
        self.advance(run)

    def measure(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)

    def advance(self, run: Run) -> None:
        self._draw(run)
        self._drawn()

    def end_epoch(self, run: Run) -> None:
        self._draw(run, finished=True)
        if run.length.max_steps is None and self._batches is not None:
            self._batches.close()
            self._batches = None
        self._drawn()

    def begin_replay(self, run: Run, total: int) -> None:
        self.begin_pass(run, "read again", total)

    def begin_pass(self, run: Run, label: str, total: int | None) -> None:
        self._passing = self._bar(BATCHES, total=total, desc=label, unit="batch")
        self._drawn()

    def advance_pass(self, done: int) -> None:
        if self._passing is not None and self._passing.update(done - self._passing.n):
            self._drawn()

    def end_pass(self, run: Run) -> None:
        if self._passing is not None:
            self._passing.close()
            self._passing = None
            self._drawn()

    def announce(self, run: Run, line: str) -> None:
        self.show([f"{run.name}  {line}"])

    def show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._tqdm.write(printable(line), file=self._file or sys.stderr)

    def restart(self) -> None:
        for bar in self._rows()[::-1]:
            bar.close()
        self._epochs = self._batches = self._measured = self._passing = None
        self._metrics = {}

    def finish(self, run: Run, status: Status) -> None:
        width = self._columns()
        facts = [run.name, *texts.position_of(run), texts.duration(run.progress.seconds), *texts.whole_speed(run)]
        metrics = metric_texts(in_order(self._metrics))
        self.restart()
        ending = texts.wrapped(f"{run.name}  {texts.verdict(run, status)}", width)
        self.show([*joined_lines([*facts, *metrics], width), *ending, *texts.warning_lines(run, width)])

    def close(self) -> None:
        self.restart()

    def _rows(self) -> list[Any]:
        return [bar for bar in (self._epochs, self._batches, self._measured, self._passing) if bar is not None]

    def _columns(self) -> int:
        return columns(self._file or sys.stderr) or WIDTH

    def _drawn(self) -> None: ...

    def _bar(self, form: str, **options: Any) -> Any:
        if options.get("total") or form == MEASURED:  # else tqdm's default format, which has no bar
            options["bar_format"] = form
        return self._tqdm(file=self._file, mininterval=self._interval, leave=False, **self.size, **options)

    def _draw(self, run: Run, *, finished: bool = False) -> None:
        metrics = self._chosen(run)
        of_validation = {name: value for name, value in metrics.items() if name.startswith("validation/")}
        beside = {name: value for name, value in metrics.items() if name not in of_validation}
        if run.length.max_steps is not None:
            self._draw_steps(run, beside, of_validation)
        else:
            self._draw_epochs(run, beside, of_validation, finished=finished)

    def _draw_steps(self, run: Run, beside: Mapping[str, float], below: Mapping[str, float]) -> None:
        steps = run.progress.steps
        if self._batches is None:
            facts = {"total": run.length.max_steps, "initial": steps, "unit": "step", "desc": _short(run.name)}
            self._batches = self._bar(BATCHES, position=0, **facts)
        _move(self._batches, steps, beside)
        if below and self._measured is None:
            self._measured = self._bar(MEASURED, position=1)
        if below:
            room = (self._measured.format_dict["ncols"] or WIDTH) - INDENT
            if (line := fitted(below, room)) != self._measured.desc:
                self._measured.set_description_str(line)

    def _draw_epochs(
        self, run: Run, beside: Mapping[str, float], of_validation: Mapping[str, float], *, finished: bool
    ) -> None:
        progress = run.progress
        if self._epochs is None:
            facts = {"total": run.length.max_epochs, "initial": progress.epoch, "unit": "epoch", "desc": "epochs "}
            self._epochs = self._bar(EPOCHS, position=0, smoothing=0, **facts)
        if self._batches is None and not finished:
            facts = {"total": run.length.batches_per_epoch, "initial": progress.batch, "desc": "batches"}
            self._batches = self._bar(BATCHES, position=1, unit="batch", **facts)
        if self._batches is not None:
            _move(self._batches, progress.batches - self._before_epoch, beside)
        _move(self._epochs, progress.epoch, of_validation)

    def _chosen(self, run: Run) -> dict[str, float]:
        if self._names is not None:
            return {name: self._metrics[name] for name in self._names if name in self._metrics}
        losses = {f"train/{run.stepping.label('loss', name)}" for name in run.optimizers}
        chosen = {n: value for n, value in self._metrics.items() if n in losses or n.startswith("validation/")}
        return in_order(chosen)


def _move(bar: Any, place: int, metrics: Mapping[str, float]) -> None:
    """Update a bar, with the metrics that leave ten columns for the bar itself."""
    beside = ""
    if metrics:
        facts = bar.format_dict
        used = len(bar.format_meter(**{**facts, "postfix": None, "ncols": None}))
        beside = fitted(metrics, (facts["ncols"] or WIDTH) - used - len(", "))
    bar.set_postfix_str(beside, refresh=False)
    bar.update(place - bar.n)


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


class NotebookBars(Bars):
    """Bars as one text output of a cell, which needs no widgets."""

    size: Mapping[str, Any] = {"ncols": WIDTH}

    def __init__(self, tqdm: Any, interval: float, metrics: Sequence[str] | None) -> None:
        super().__init__(tqdm, _Nowhere(), interval, metrics)
        self._output: Any = None
        self._lines: list[str] = []

    def finish(self, run: Run, status: Status) -> None:
        super().finish(run, status)
        self._output, self._lines = None, []

    def close(self) -> None:
        super().close()
        if self._output is not None:
            self._drawn()
        self._output, self._lines = None, []

    def show(self, lines: Iterable[str]) -> None:
        self._lines += map(printable, lines)
        self._drawn()

    def _columns(self) -> int:
        return WIDTH

    def _drawn(self) -> None:
        shown = {"text/plain": "\n".join([*self._lines, *map(str, self._rows())])}
        if self._output is None:
            display = require("IPython.display", "ProgressBar").display
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)


class _Nowhere:
    """Discards what tqdm writes; the output of the cell is the `str` of its bars."""

    encoding = "utf-8"  # or tqdm would draw with ASCII

    def write(self, written: str) -> int:
        return len(written)

    def flush(self) -> None:
        pass


def fitted(metrics: Mapping[str, float], room: int) -> str:
    """Return the first metrics that fit into a width: `train loss=0.31 accuracy=0.88`."""
    text = last = ""
    for name, value in metrics.items():
        split, _, short = printable(name).rpartition("/")
        joint = " " if split == last else ", "
        item = (joint if text else "") + (f"{split} " if split and (split != last or not text) else "")
        item += f"{short}={value:.4g}"
        if len(text) + len(item) > room:
            break
        text, last = text + item, split
    return text


def joined_lines(parts: Iterable[str], width: int) -> list[str]:
    """Return parts as lines, separated by two spaces; no part is broken."""
    lines = [""]
    for part in map(printable, parts):
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append("  " + part)
        else:
            lines[-1] += ("  " if lines[-1] else "") + part
    return lines
