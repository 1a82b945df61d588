"""The progress of a run: bars in a terminal or a notebook, otherwise plain lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from ...core.system.extras import require
from ...events import Lane
from ...events import catalogue as ev
from ...events.checks import check_flag, check_number
from ...events.progress import verified
from ...plugins import Plugin, on
from .texts import PlainLines, columns

if TYPE_CHECKING:
    from ...events import Run
    from .bars import Bars


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
        self._display: Bars | PlainLines = PlainLines(file)
        if not self.plain:
            from .bars import Bars, NotebookBars  # imported to draw bars

            self._display = (
                NotebookBars(tqdm, self.interval, metrics) if in_notebook else Bars(tqdm, file, self.interval, metrics)
            )
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
