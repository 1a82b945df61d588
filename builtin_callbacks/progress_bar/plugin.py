"""Show how far the run is, by bars or by plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, TextIO

from ...core.system.extras import require
from ...events import Lane, Run
from ...events import catalogue as ev
from ...events.catalogue import Status
from ...events.checks import check_flag, check_number, printable
from ...events.errors import count
from ...events.resume_facts import verified
from ...plugins import Plugin, on
from . import text
from .text import Pace, duration

NAME = 20  # columns of a run's name beside a bar
EPOCHS = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
BATCHES = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
INDENT = 2
MEASURED = INDENT * " " + "{desc}"  # below the bar of the steps, which has no room for it


class ProgressBar(Plugin):
    """Draw bars, or write plain lines where there is no terminal.

    A run by epochs has two bars, the epochs and the batches of the current one; a run by steps has one. A validation,
    test or prediction has a bar while it runs. Beside the bars are the last logged metrics, so nothing waits for the
    device; those that leave no room for the bar are left out, from the end. When the run is over, text takes the place
    of the bars: how far it came, its metrics, how it ended, its warnings; after Ctrl-C or a failure the newest
    checkpoint.

    `epochs 3/10` means that 3 are done: it is `run.progress.epoch`, which is also the number in the names of
    checkpoints, and the index of the epoch that is running.

    In a notebook the bars are one output of the cell, which is replaced.

    A plain line is written when it is time to and after each validation. It has the time so far, the recent speed, the
    time that is left where that is known, and every metric that no line has shown yet.

    Args:
        interval: the least seconds between two redraws of a bar.
        plain_interval: the least seconds between two plain lines.
        plain: None finds out; True writes lines, False draws bars.
        metrics: the names of the metrics beside the bars, those to keep in a narrow terminal first; None shows the
            training losses and the validation's metrics. Plain lines show all.
        file: where to; by default standard error, in a notebook an output of the cell.
        show_plan: whether to write first what the run will do, as `run.report.plan()` says.

    Raises:
        ValueError: an interval is negative.
        TypeError: `metrics` is a single text.
    """

    name = "progress"
    policy = "observer"
    draws = False
    ranks = "main"
    exclusive = ("progress",)

    def __init__(
        self,
        *,
        interval: float = 0.1,
        plain_interval: float = 10.0,
        plain: bool | None = None,
        metrics: Sequence[str] | None = None,
        file: TextIO | None = None,
        show_plan: bool = True,
    ) -> None:
        self.interval = check_number("interval", interval, of="seconds", at_least=0, finite=False)
        self.plain_interval = check_number("plain_interval", plain_interval, of="seconds", at_least=0, finite=False)
        if isinstance(metrics, str):
            raise TypeError(f"metrics takes a list of names, got {metrics!r}: give [{metrics!r}].")
        if plain is not None:
            check_flag("plain", plain, or_else="None")
        check_flag("show_plan", show_plan)
        self.metrics, self.show_plan = metrics, show_plan
        in_notebook = file is None and _in_notebook()
        self.plain = not (in_notebook or _is_terminal(file or sys.stderr)) if plain is None else plain
        tqdm = require("tqdm", "ProgressBar").tqdm
        self._display: Bars | PlainLines
        if self.plain:
            self._display = PlainLines(file)
        elif in_notebook:
            self._display = NotebookBars(tqdm, self.interval, metrics)
        else:
            self._display = Bars(tqdm, file, self.interval, metrics)
        self._due = 0.0
        self._has_begun = False

    def reset(self) -> None:
        self._restart()
        self._has_begun = False

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Show where the run continues; new bars begin there."""
        self._restart()
        if self._has_begun or not self.show_plan:  # else the plan, which is next, says it
            place = f"{'went back to' if self._has_begun else 'resumed at'} step {run.progress.steps}"
            self._display.announce(run, place)

    @on(ev.ResumeVerified, lane=Lane.REPORT)
    def print_verified(self, run: Run, event: ev.ResumeVerified) -> None:
        """Say what comparing the steps that were done again has shown."""
        if event.steps:
            self._display.announce(run, verified(event.steps))
        if event.difference is not None:
            self._display.announce(run, f"the resumed run {event.difference}")

    @on(ev.EpochStart, lane=Lane.REPORT)
    def start_epoch(self, run: Run, event: ev.EpochStart) -> None:
        """Show what the run will do, and begin the bar of the batches."""
        if self.show_plan and not self._has_begun:
            self._display.show(run.report.plan().splitlines())
        self._has_begun = True
        self._display.begin_epoch(run)

    @on(ev.Replay, lane=Lane.REPORT)
    def show_replay(self, run: Run, event: ev.Replay) -> None:
        """Show how far the loader is read again, which may take as long as training on it did."""
        if event.done == 0:
            self._display.begin_replay(run, event.batches)
        self._display.advance_pass(event.done)
        if event.done == event.batches:
            self._display.end_pass(run)

    @on(ev.BatchEnd, lane=Lane.REPORT)
    def advance(self, run: Run, event: ev.BatchEnd) -> None:
        """Move on, if it is time to."""
        if (now := monotonic()) >= self._due:
            self._due = now + (self.plain_interval if self.plain else self.interval)
            self._display.advance(run)

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT, optional=True)
    def show_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Show the newest numbers."""
        self._display.measure(run, event.metrics)
        if not isinstance(event, ev.Log):
            self._display.end_pass(run)
            self._due = monotonic() + self.plain_interval if self.plain else self._due

    @on(ev.ValidationCut, lane=Lane.REPORT)
    def cut_evaluation(self, run: Run, event: ev.ValidationCut) -> None:
        """Remove the bar of the validation or test: there are no numbers."""
        self._display.end_pass(run)

    @on(ev.EpochEnd, lane=Lane.REPORT, optional=True)
    def end_epoch(self, run: Run, event: ev.EpochEnd) -> None:
        """Fill the bar of the batches, and move that of the epochs."""
        self._display.end_epoch(run)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.REPORT, optional=True)
    def start_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Begin the bar of a validation, test or prediction."""
        self._display.begin_pass(run, event.name.split("_")[0], run.data.evaluation_batches)

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd, lane=Lane.REPORT, optional=True)
    def advance_evaluation(self, run: Run, event: ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd) -> None:
        """Move it."""
        self._display.advance_pass(run.progress.evaluated)

    @on(ev.RunClosed, lane=Lane.DECIDE)
    def warn_of_unknown_metrics(self, run: Run, event: ev.RunClosed) -> None:
        """Say which metrics of `metrics` never came."""
        unknown = [name for name in self.metrics or () if name not in run.metrics]
        if unknown and run.metrics and run.optimizer is not None and event.status in ("completed", "stopped"):
            run.warn(
                f"ProgressBar did not show {', '.join(unknown)}: nothing of that name was logged. Logged were "
                f"{', '.join(sorted(run.metrics))}."
            )

    @on(ev.RunClosed, lane=Lane.REPORT, after=("jsonl_log", "tensorboard", "file_log", "recorder"))
    def finish(self, run: Run, event: ev.RunClosed) -> None:
        """Say how the run ended."""
        self._display.finish(run, event.status)

    def close(self) -> None:
        self._display.close()

    def _restart(self) -> None:
        self._display.restart()
        self._due = monotonic() + self.plain_interval if self.plain else 0.0


def _is_terminal(file: TextIO) -> bool:
    """Return whether bars can be drawn: a terminal of no known size, as in some containers, would show nothing."""
    return getattr(file, "isatty", lambda: False)() and columns(file) != 0


def _in_notebook() -> bool:
    """Return whether a notebook's kernel runs this process."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class PlainLines:
    """Writes a line now and then: where the run is, how fast, and the metrics that no line has shown yet.

    Args:
        file: where to; None is standard error.
    """

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._fresh: dict[str, float] = {}
        self._pace: Pace | None = None
        self._shown: int | None = None

    def begin_epoch(self, run: Run) -> None:
        """Measure the pace from here, if this is where the run begins or continues."""
        if self._pace is None:
            self._pace, self._shown = Pace(run), run.progress.steps

    def measure(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Keep metrics for the next line."""
        self._fresh.update(metrics)

    def advance(self, run: Run) -> None:
        """Write a line."""
        self._write_place(run, [] if self._pace is None else self._pace.look(run))

    def end_epoch(self, run: Run) -> None:
        """Write nothing: the next line says it."""

    def begin_replay(self, run: Run, total: int) -> None:
        """Say that the loader is read again, which may take as long as training on it did."""
        self.announce(run, f"reads {count(total, 'batch', 'batches')} of epoch {run.progress.epoch} again")

    def begin_pass(self, run: Run, what: str, total: int | None) -> None:
        """Write nothing."""

    def advance_pass(self, done: int) -> None:
        """Write nothing."""

    def end_pass(self, run: Run) -> None:
        """Write what was measured; of an evaluation outside of a training at its end."""
        if self._fresh and run.optimizer is not None:
            self.advance(run)

    def announce(self, run: Run, line: str) -> None:
        """Write a line of its own."""
        self._print(f"{run.name}  {line}")

    def show(self, lines: Sequence[str]) -> None:
        """Write lines."""
        for line in lines:
            self._print(line)

    def restart(self) -> None:
        """Forget metrics and pace."""
        self._fresh, self._pace, self._shown = {}, None, None

    def finish(self, run: Run, status: Status) -> None:
        """Write what no line has shown yet, how the run ended, and what did not happen."""
        if run.optimizer is None:
            self._write_place(run, [status])
        else:
            if self._fresh or self._shown not in (None, run.progress.steps):
                self._write_place(run, [] if self._pace is None else self._pace.whole(run))
            self.announce(run, text.verdict(run, status))
        for line in text.warnings(run):
            self._print(line)

    def close(self) -> None:
        self.restart()

    def _write_place(self, run: Run, more: list[str]) -> None:
        self._shown = run.progress.steps
        time = duration(run.progress.seconds)
        metrics = text.values(text.in_order(self._fresh))
        self._fresh = {}
        self._print("  ".join([run.name, *text.position(run), time, *more, *metrics]))

    def _print(self, line: str) -> None:
        print(printable(line), file=self._file or sys.stderr, flush=True)  # its very purpose


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
        if run.length.max_steps is None and self._batches is not None:
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
        if run.length.max_steps is not None:
            self._draw_steps(run, others, of_validation)
        else:
            self._draw_epochs(run, others, of_validation, finished=finished)

    def _draw_steps(self, run: Run, beside: Mapping[str, float], below: Mapping[str, float]) -> None:
        steps = run.progress.steps
        if self._batches is None:
            facts = {"total": run.length.max_steps, "initial": steps, "unit": "step", "desc": _short(run.name)}
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
                "total": run.length.max_epochs,
                "initial": progress.epoch,
                "unit": "epoch",
                "desc": "epochs ",
                "smoothing": 0,
            }
            self._epochs = self._bar(EPOCHS, position=0, **facts)
        if self._batches is None and not finished:
            facts = {
                "total": run.length.batches_per_epoch,
                "initial": progress.batch,
                "unit": "batch",
                "desc": "batches",
            }
            self._batches = self._bar(BATCHES, position=1, **facts)
        if self._batches is not None:
            _move(self._batches, progress.batches - self._before_epoch, beside)
        _move(self._epochs, progress.epoch, of_validation)

    def _chosen(self, run: Run) -> dict[str, float]:
        if self._names is not None:
            return {name: self._metrics[name] for name in self._names if name in self._metrics}
        losses = {f"train/{run.stepping.label('loss', name)}" for name in run.optimizers}
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
