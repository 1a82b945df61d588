"""Show how far the run is, by bars or by plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import TextIO

from ...core.system.extras import printable, require
from ...events import (
    BatchEnd,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
    PredictBatchEnd,
    PredictEnd,
    PredictStart,
    Replay,
    ResumeVerified,
    Run,
    RunClosed,
    TestBatchEnd,
    TestEnd,
    TestStart,
    ValidationBatchEnd,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from ...events.catalogue import Status
from ...events.checks import check_flag, check_number
from ...events.errors import count
from ...events.guarantee import verified
from ...plugins import Plugin, on
from . import text
from .bars import Bars, NotebookBars, columns
from .text import Pace, duration


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
        show_plan: whether to write first what the run will do, as `run.plan()` says.

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
        """Forget the former run's bars and numbers."""
        self._restart()
        self._has_begun = False

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Show where the run continues; new bars begin there."""
        self._restart()
        if self._has_begun or not self.show_plan:  # else the plan, which is next, says it
            place = f"{'went back to' if self._has_begun else 'resumed at'} step {run.progress.steps}"
            self._display.announce(run, place)

    @on(ResumeVerified, lane=Lane.REPORT)
    def print_verified(self, run: Run, event: ResumeVerified) -> None:
        """Say what comparing the steps that were done again has shown."""
        if event.steps:
            self._display.announce(run, verified(event.steps))
        if event.difference is not None:
            self._display.announce(run, f"NOT exact: what was done again {event.difference}")

    @on(EpochStart, lane=Lane.REPORT)
    def start_epoch(self, run: Run, event: EpochStart) -> None:
        """Show what the run will do, and begin the bar of the batches."""
        if self.show_plan and not self._has_begun:
            self._display.show(run.plan().splitlines())
        self._has_begun = True
        self._display.begin_epoch(run)

    @on(Replay, lane=Lane.REPORT)
    def show_replay(self, run: Run, event: Replay) -> None:
        """Show how far the loader is read again, which may take as long as training on it did."""
        if event.done == 0:
            self._display.begin_replay(run, event.batches)
        self._display.advance_pass(event.done)
        if event.done == event.batches:
            self._display.end_pass(run)

    @on(BatchEnd, lane=Lane.REPORT)
    def advance(self, run: Run, event: BatchEnd) -> None:
        """Move on, if it is time to."""
        if (now := monotonic()) >= self._due:
            self._due = now + (self.plain_interval if self.plain else self.interval)
            self._display.advance(run)

    @on(Log, ValidationEnd, TestEnd, PredictEnd, lane=Lane.REPORT, optional=True)
    def show_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> None:
        """Show the newest numbers."""
        self._display.measure(run, event.metrics)
        if not isinstance(event, Log):
            self._display.end_pass(run)
            self._due = monotonic() + self.plain_interval if self.plain else self._due

    @on(ValidationCut, lane=Lane.REPORT)
    def cut_evaluation(self, run: Run, event: ValidationCut) -> None:
        """Remove the bar of the validation or test: there are no numbers."""
        self._display.end_pass(run)

    @on(EpochEnd, lane=Lane.REPORT, optional=True)
    def end_epoch(self, run: Run, event: EpochEnd) -> None:
        """Fill the bar of the batches, and move that of the epochs."""
        self._display.end_epoch(run)

    @on(ValidationStart, TestStart, PredictStart, lane=Lane.REPORT, optional=True)
    def start_evaluation(self, run: Run, event: ValidationStart | TestStart | PredictStart) -> None:
        """Begin the bar of a validation, test or prediction."""
        self._display.begin_pass(run, event.name.split("_")[0], run.evaluation_batches)

    @on(ValidationBatchEnd, TestBatchEnd, PredictBatchEnd, lane=Lane.REPORT, optional=True)
    def advance_evaluation(self, run: Run, event: ValidationBatchEnd | TestBatchEnd | PredictBatchEnd) -> None:
        """Move it."""
        self._display.advance_pass(run.progress.evaluated)

    @on(RunClosed, lane=Lane.DECIDE)
    def warn_of_unknown_metrics(self, run: Run, event: RunClosed) -> None:
        """Say which metrics of `metrics` never came."""
        unknown = [name for name in self.metrics or () if name not in run.metrics]
        if unknown and run.metrics and run.optimizer is not None and event.status in ("completed", "stopped"):
            run.warn(
                f"ProgressBar did not show {', '.join(unknown)}: nothing of that name was logged. Logged were "
                f"{', '.join(sorted(run.metrics))}."
            )

    @on(RunClosed, lane=Lane.REPORT, after=("jsonl_log", "tensorboard", "file_log", "recorder"))
    def finish(self, run: Run, event: RunClosed) -> None:
        """Say how the run ended."""
        self._display.finish(run, event.status)

    def close(self) -> None:
        """Remove every bar."""
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
        """Forget the run."""
        self.restart()

    def _write_place(self, run: Run, more: list[str]) -> None:
        self._shown = run.progress.steps
        time = duration(run.progress.seconds)
        metrics = text.values(text.in_order(self._fresh))
        self._fresh = {}
        self._print("  ".join([run.name, *text.position(run), time, *more, *metrics]))

    def _print(self, line: str) -> None:
        print(printable(line), file=self._file or sys.stderr, flush=True)  # its very purpose
