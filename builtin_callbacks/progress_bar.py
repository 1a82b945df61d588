"""The progress of a run: bars in a terminal or a notebook, otherwise plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from time import monotonic
from typing import Any, TextIO

from ..core.host import is_preempted
from ..core.system.extras import require
from ..events import Lane, Run, Status
from ..events import catalogue as ev
from ..events.checks import check_flag, check_number, count, printable
from ..events.progress import Rates, verified
from ..plugins import Plugin, on

WIDTH = 80  # columns without a terminal
SPLITS = ("train", "validation", "test", "predict")
NAME = 20  # columns of a run's name next to a bar
EPOCHS = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
BATCHES = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
INDENT = 2
MEASURED = INDENT * " " + "{desc}"  # the metrics of the validation, below the bar of the steps


class ProgressBar(Plugin):
    """Draw progress bars, or write plain lines without a terminal.

    A run by epochs has two bars, for the epochs and for the batches of the current epoch; a run by steps has one. A
    validation, test or prediction has a bar while it runs. The last logged metrics are shown next to the bars, as far
    as there is room, so nothing waits for the device. At the end, a text replaces the bars: how far the run came, its
    metrics, how it ended and its warnings; after a Ctrl-C or a failure also the newest checkpoint.

    `epochs 3/10` means that 3 epochs are done. This is `run.progress.epoch`, which is also the number in the names of
    checkpoints, and the index of the current epoch. In a notebook, the bars are one output of the cell, which is
    updated.

    Plain lines are written at an interval and after each validation. They contain the time so far, the recent speed,
    the remaining time if it is known, and the metrics since the last line.

    Args:
        interval: the minimum number of seconds between two updates of a bar.
        plain_interval: the minimum number of seconds between two plain lines.
        plain: True writes lines, False draws bars, None detects a terminal.
        metrics: the names of the metrics next to the bars; the first ones have priority in a narrow terminal. None
            shows the training losses and the metrics of the validation. Plain lines show all.
        file: the file to write to; by default standard error, in a notebook an output of the cell.
        show_plan: whether to show first what the run will do, as in `run.report.plan()`.

    Raises:
        ValueError: an interval is negative.
        TypeError: `metrics` is a string.
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
        """Show where the run continues, and restart the bars."""
        self._restart()
        if self._has_begun or not self.show_plan:  # else the plan follows, which contains the position
            place = f"{'went back to' if self._has_begun else 'resumed at'} step {run.progress.steps}"
            self._display.announce(run, place)

    @on(ev.ResumeVerified, lane=Lane.REPORT)
    def print_verified(self, run: Run, event: ev.ResumeVerified) -> None:
        """Show the result of comparing the repeated steps."""
        if event.steps:
            self._display.announce(run, verified(event.steps))
        if event.difference is not None:
            self._display.announce(run, f"the resumed run {event.difference}")

    @on(ev.EpochStart, lane=Lane.REPORT)
    def start_epoch(self, run: Run, event: ev.EpochStart) -> None:
        """Show the plan of the run and start the bar of the batches."""
        if self.show_plan and not self._has_begun:
            self._display.show(run.report.plan().splitlines())
        self._has_begun = True
        self._display.begin_epoch(run)

    @on(ev.Replay, lane=Lane.REPORT)
    def show_replay(self, run: Run, event: ev.Replay) -> None:
        """Show how many batches were read again, which may take long."""
        if event.done == 0:
            self._display.begin_replay(run, event.batches)
        self._display.advance_pass(event.done)
        if event.done == event.batches:
            self._display.end_pass(run)

    @on(ev.BatchEnd, lane=Lane.REPORT)
    def advance(self, run: Run, event: ev.BatchEnd) -> None:
        """Update the display if the interval has passed."""
        if (now := monotonic()) >= self._due:
            self._due = now + (self.plain_interval if self.plain else self.interval)
            self._display.advance(run)

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT, optional=True)
    def show_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Show the newest metrics."""
        self._display.measure(run, event.metrics)
        if not isinstance(event, ev.Log):
            self._display.end_pass(run)
            self._due = monotonic() + self.plain_interval if self.plain else self._due

    @on(ev.ValidationCut, lane=Lane.REPORT)
    def cut_evaluation(self, run: Run, event: ev.ValidationCut) -> None:
        """Remove the bar of the evaluation."""
        self._display.end_pass(run)

    @on(ev.EpochEnd, lane=Lane.REPORT, optional=True)
    def end_epoch(self, run: Run, event: ev.EpochEnd) -> None:
        """Complete the bar of the batches and update the epochs."""
        self._display.end_epoch(run)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.REPORT, optional=True)
    def start_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Start the bar of a validation, test or prediction."""
        self._display.begin_pass(run, event.name.split("_")[0], run.data.evaluation_batches)

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd, lane=Lane.REPORT, optional=True)
    def advance_evaluation(self, run: Run, event: ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd) -> None:
        """Update the bar of the evaluation."""
        self._display.advance_pass(run.progress.evaluated)

    @on(ev.RunClosed, lane=Lane.DECIDE)
    def warn_of_unknown_metrics(self, run: Run, event: ev.RunClosed) -> None:
        """Warn about names in `metrics` that were never logged."""
        unknown = [name for name in self.metrics or () if name not in run.metrics]
        if unknown and run.metrics and run.optimizer is not None and event.status in ("completed", "stopped"):
            logged = ", ".join(sorted(run.metrics))
            run.warn(f"ProgressBar did not show {', '.join(unknown)}, never logged. Logged metrics: {logged}.")

    @on(ev.RunClosed, lane=Lane.REPORT, after=("jsonl_log", "tensorboard", "file_log", "recorder"))
    def finish(self, run: Run, event: ev.RunClosed) -> None:
        """Show how the run ended."""
        self._display.finish(run, event.status)

    def close(self) -> None:
        self._display.close()

    def _restart(self) -> None:
        self._display.restart()
        self._due = monotonic() + self.plain_interval if self.plain else 0.0


def _is_terminal(file: TextIO) -> bool:
    return getattr(file, "isatty", lambda: False)() and columns(file) != 0


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"


class PlainLines:
    """Writes lines to a file, or to standard error."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self._fresh: dict[str, float] = {}
        self._rates, self._rate = Rates(), 0.0
        self._shown: int | None = None

    def begin_epoch(self, run: Run) -> None:
        if self._shown is None:
            self._shown = run.progress.steps
            self._rates.start(run.progress, run.progress.seconds)

    def measure(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._fresh.update(metrics)

    def advance(self, run: Run) -> None:
        rate = self._rate = self._rates.read(run.progress, run.progress.seconds).get("steps_per_second", self._rate)
        remaining = []
        if rate and run.length.planned_steps and run.length.fraction is not None and run.length.fraction < 1:
            remaining = [f"ETA {duration(run.length.planned_steps * (1 - run.length.fraction) / rate)}"]
        self._write_place(run, [*speed(rate, 1.0), *remaining])

    def end_epoch(self, run: Run) -> None: ...

    def begin_replay(self, run: Run, total: int) -> None:
        self.announce(run, f"reads {count(total, 'batch', 'batches')} of epoch {run.progress.epoch} again")

    def begin_pass(self, run: Run, label: str, total: int | None) -> None: ...

    def advance_pass(self, done: int) -> None: ...

    def end_pass(self, run: Run) -> None:
        if self._fresh and run.optimizer is not None:
            self.advance(run)

    def announce(self, run: Run, line: str) -> None:
        self.show([f"{run.name}  {line}"])

    def show(self, lines: Iterable[str]) -> None:
        for line in lines:
            print(printable(line), file=self._file or sys.stderr, flush=True)

    def restart(self) -> None:
        self._fresh, self._rates, self._rate, self._shown = {}, Rates(), 0.0, None

    def finish(self, run: Run, status: Status) -> None:
        if run.optimizer is None:
            self._write_place(run, [status])
        else:
            if self._fresh or self._shown not in (None, run.progress.steps):
                self._write_place(run, whole_speed(run))
            self.announce(run, verdict(run, status))
        self.show(warning_lines(run))

    def close(self) -> None:
        self.restart()

    def _write_place(self, run: Run, more: list[str]) -> None:
        self._shown = run.progress.steps
        time = duration(run.progress.seconds)
        metrics = metric_texts(in_order(self._fresh))
        self._fresh = {}
        self.show(["  ".join([run.name, *position_of(run), time, *more, *metrics])])


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
        facts = [run.name, *position_of(run), duration(run.progress.seconds), *whole_speed(run)]
        metrics = metric_texts(in_order(self._metrics))
        self.restart()
        ending = wrapped(f"{run.name}  {verdict(run, status)}", width)
        self.show([*joined_lines([*facts, *metrics], width), *ending, *warning_lines(run, width)])

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


def columns(file: TextIO) -> int | None:
    """Return the width of a terminal; 0 if it has no size, None if it is unknown."""
    try:
        size = os.get_terminal_size(file.fileno())
        return size.columns if size.lines else 0
    except (OSError, ValueError, AttributeError):  # a replaced stream
        return None


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


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by split, losses first, then by name."""
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


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


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in metrics.items()]


def position_of(run: Run) -> list[str]:
    """Return what is done: `epochs 3/10`, `steps 480`."""
    progress = run.progress
    if run.optimizer is None:
        return [run.phase, f"batches {progress.evaluated}"]
    return [
        f"epochs {progress.epoch}" + (f"/{run.length.max_epochs}" if run.length.max_epochs is not None else ""),
        f"steps {progress.steps}" + (f"/{run.length.max_steps}" if run.length.max_steps is not None else ""),
    ]


def verdict(run: Run, status: Status) -> str:
    """Return how a run ended, and after a failure also the newest checkpoint."""
    if run.optimizer is None:
        return status
    text = f"{status} at step {run.progress.steps}"
    stop = run.control.stop_request
    newest = "" if run.checkpoints.last is None else f"; the newest checkpoint is {run.checkpoints.last}"
    if status == "stopped" and stop is not None:
        return f"{text} by {stop.by}: {stop.reason}" + (newest if is_preempted(run) else "")
    if status in ("interrupted", "failed"):
        return text + (newest or "; there is no checkpoint" * (run.progress.steps > run.origin.steps))
    return text if run.report.is_replay else f"{status}: {run.report.reason(None)}"


def warning_lines(run: Run, width: int = WIDTH) -> list[str]:
    return [line for warning in run.report.warnings for line in wrapped(f"WARNING: {warning}", width)]


def wrapped(text: str, width: int) -> list[str]:
    return wrap(printable(text), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def joined_lines(parts: Iterable[str], width: int) -> list[str]:
    """Return parts as lines, separated by two spaces; no part is broken."""
    lines = [""]
    for part in map(printable, parts):
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append("  " + part)
        else:
            lines[-1] += ("  " if lines[-1] else "") + part
    return lines


def _rank(name: str) -> tuple[int, bool, str]:
    split = name.partition("/")[0]
    return SPLITS.index(split) if split in SPLITS else len(SPLITS), not name.endswith("loss"), name


def whole_speed(run: Run) -> list[str]:
    """Return the speed since the start or the resume of a run."""
    return speed(run.progress.steps - run.origin.steps, run.progress.seconds - run.origin.earlier_seconds)


def speed(steps: float, seconds: float) -> list[str]:
    """Return a speed such as `45.2 steps/s` or `2 s/step`; nothing without steps or time."""
    if not steps or seconds <= 0:
        return []
    rate = steps / seconds
    if rate < 1:
        return [f"{1 / rate:.3g} s/step"]
    return [f"{rate:.3g} steps/s" if rate < 999.5 else f"{rate:.0f} steps/s"]


def duration(seconds: float) -> str:
    """Return a time such as 01:20 or 1:01:20, as bars show it."""
    minutes, second = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes:02}:{second:02}"
