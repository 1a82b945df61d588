"""Show how far the run is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Any, TextIO

from ..core.system.extras import require
from ..events import (
    BatchEnd,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
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
from ..events.checks import check_flag, check_number
from ..events.guarantee import verified
from ..plugins import Plugin, on


class ProgressBar(Plugin):
    """Draw tqdm bars, or write plain lines where there is no terminal.

    A run by epochs has two bars, the epochs and the batches of the current one; a run by steps has one. Validation and
    test have a bar that goes away. The metrics beside the bar are the last logged ones, so nothing waits for the
    device.

    Args:
        interval: the least seconds between two redraws of a bar.
        plain_interval: the least seconds between two plain lines.
        plain: None finds out; True writes lines, False draws bars.
        metrics: the names of the metrics beside the bars; None shows `train/loss` and the validation's. Plain lines
            show all.
        file: where to; by default standard error, in a notebook the notebook's own bars.

    Raises:
        ValueError: an interval is negative.
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
    ) -> None:
        self.interval = check_number("interval", interval, of="seconds", at_least=0, finite=False)
        self.plain_interval = check_number("plain_interval", plain_interval, of="seconds", at_least=0, finite=False)
        if isinstance(metrics, str):
            raise TypeError(f"metrics is a list of names, [{metrics!r}], not {metrics!r}.")
        if plain is not None:
            check_flag("plain", plain, or_else="None")
        self.metrics = metrics
        self._file = file
        self.plain = not (_in_notebook() or _is_terminal(file or sys.stderr)) if plain is None else plain
        self._tqdm = require("tqdm.auto", "ProgressBar").tqdm
        self._epochs: Any = None
        self._batches: Any = None
        self._passing: Any = None
        self._due = 0.0
        self._before_epoch = 0
        self._has_begun = False
        self._metrics: dict[str, float] = {}

    def reset(self) -> None:
        """Forget the former run's bars and numbers."""
        self._begin()
        self._has_begun = False

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Show where the run continues; new bars begin there."""
        self._begin()
        self._announce(run, f"{'went back to' if self._has_begun else 'resumed at'} step {run.progress.steps}")

    @on(ResumeVerified, lane=Lane.REPORT)
    def print_verified(self, run: Run, event: ResumeVerified) -> None:
        """Say what comparing the steps that were done again has shown."""
        if event.steps:
            self._announce(run, verified(event.steps))
        if event.difference is not None:
            self._announce(run, f"NOT exact: what was done again {event.difference}")

    @on(EpochStart, lane=Lane.REPORT)
    def start_epoch(self, run: Run, event: EpochStart) -> None:
        """Begin the bar of the batches."""
        self._has_begun = True
        self._before_epoch = run.progress.batches - run.progress.batch
        if not self.plain:
            self._draw(run)

    @on(Replay, lane=Lane.REPORT)
    def show_replay(self, run: Run, event: Replay) -> None:
        """Show how far the loader is read again, which may take as long as training on it did."""
        if self.plain:
            if event.done == 0:
                self._print(f"{run.name}  reads {event.batches} batches of epoch {run.progress.epoch} again")
        else:
            if self._passing is None:
                self._passing = self._bar(total=event.batches, desc="read again", leave=False, unit="batch")
            self._passing.update(event.done - self._passing.n)
        if event.done == event.batches:
            self._close_passing()

    @on(BatchEnd, lane=Lane.REPORT)
    def advance(self, run: Run, event: BatchEnd) -> None:
        """Move on, if it is time to."""
        now = monotonic()
        if now < self._due:
            return
        if self.plain:
            self._due = now + self.plain_interval
            self._say(run)
        else:
            self._due = now + self.interval
            self._draw(run)

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT)
    def show_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Show the newest numbers."""
        self._metrics.update(event.metrics)
        if not isinstance(event, Log):
            self._close_passing()
            if self.plain:
                self._say(run)

    @on(ValidationCut, lane=Lane.REPORT)
    def cut_evaluation(self, run: Run, event: ValidationCut) -> None:
        """Take the bar that goes away off: there are no numbers."""
        self._close_passing()

    @on(EpochEnd, lane=Lane.REPORT)
    def end_epoch(self, run: Run, event: EpochEnd) -> None:
        """Fill the batches' bar, and move the epochs' bar."""
        if not self.plain:
            self._draw(run, finished=True)
            if run.max_steps is None and self._batches is not None:
                self._batches.close()
                self._batches = None

    @on(ValidationStart, TestStart, lane=Lane.REPORT)
    def start_evaluation(self, run: Run, event: ValidationStart | TestStart) -> None:
        """Begin a bar that goes away."""
        if not self.plain:
            name = event.name.split("_")[0]
            self._passing = self._bar(total=run.evaluation_batches, desc=name, leave=False, unit="batch")

    @on(ValidationBatchEnd, TestBatchEnd, lane=Lane.REPORT)
    def advance_evaluation(self, run: Run, event: ValidationBatchEnd | TestBatchEnd) -> None:
        """Move the bar that goes away."""
        if self._passing is not None:
            self._passing.update(run.progress.evaluated - self._passing.n)

    @on(RunClosed, lane=Lane.REPORT)
    def finish(self, run: Run, event: RunClosed) -> None:
        """Leave the bars where the run ended."""
        if self.plain:
            self._say(run, event.status)
        elif self._epochs is not None or self._batches is not None:
            self._draw(run, finished=self._batches is None)

    def close(self) -> None:
        """Close every bar."""
        self._metrics = {}
        self._close_passing()
        for bar in (self._batches, self._epochs):
            if bar is not None:
                bar.close()
        self._epochs = self._batches = None

    def _begin(self) -> None:
        self.close()
        self._due = monotonic() + self.plain_interval if self.plain else 0.0

    def _close_passing(self) -> None:
        if self._passing is not None:
            self._passing.close()
            self._passing = None

    def _bar(self, **options: Any) -> Any:
        return self._tqdm(file=self._file, mininterval=self.interval, dynamic_ncols=True, **options)

    def _draw(self, run: Run, *, finished: bool = False) -> None:
        """Make the bars that are missing, and move them to where the run is."""
        progress = run.progress
        by_steps = run.max_steps is not None
        if not by_steps and self._epochs is None:
            self._epochs = self._bar(
                total=run.max_epochs, initial=progress.epoch, desc="epochs", unit="epoch", position=0
            )
        if self._batches is None and not finished:
            if by_steps:
                options = {"total": run.max_steps, "initial": progress.steps, "unit": "step", "desc": run.name}
            else:
                total, place = run.batches_per_epoch, progress.batch
                options = {"total": total, "initial": place, "unit": "batch", "desc": f"epoch {progress.epoch}"}
            self._batches = self._bar(position=0 if by_steps else 1, leave=by_steps, **options)
        if self._batches is not None:
            if by_steps:
                self._move(self._batches, progress.steps)
            else:
                self._move(self._batches, progress.batches - self._before_epoch, ("train",))
        if self._epochs is not None:
            self._move(self._epochs, progress.epoch, ("validation",))

    def _move(self, bar: Any, place: int, splits: tuple[str, ...] = ("train", "validation")) -> None:
        """Move a bar, with the numbers of some splits beside it: more than a few would leave no room for the bar."""
        shown = {name: value for name, value in self._metrics.items() if name.startswith(splits) and self._shows(name)}
        bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()}, refresh=False)
        bar.update(place - bar.n)

    def _shows(self, name: str) -> bool:
        if self.metrics is not None:
            return name in self.metrics
        return name == "train/loss" or name.startswith("validation/")

    def _say(self, run: Run, status: str = "") -> None:
        """Write one plain line."""
        progress = run.progress
        epochs = f"epoch {progress.epoch}" + (f"/{run.max_epochs}" if run.max_epochs else "")
        steps = f"step {progress.steps}" + (f"/{run.max_steps}" if run.max_steps else "")
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in self._metrics.items())
        line = "  ".join(
            part for part in (run.name, epochs, steps, f"{progress.seconds:.0f} s", metrics, status) if part
        )
        self._print(line)

    def _announce(self, run: Run, text: str) -> None:
        """Write a line of its own, above the bars if there are some."""
        if self.plain:
            self._print(f"{run.name}  {text}")
        else:
            self._tqdm.write(f"{run.name}  {text}", file=self._file or sys.stderr)

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stderr, flush=True)  # its very purpose


def _is_terminal(file: TextIO) -> bool:
    """Return whether bars can be drawn: a terminal of no known size, as in some containers, would show nothing."""
    if not getattr(file, "isatty", lambda: False)():
        return False
    try:
        return min(os.get_terminal_size(file.fileno())) > 0
    except (OSError, ValueError):  # a replaced stream that says it is a terminal
        return True


def _in_notebook() -> bool:
    """Return whether a notebook's kernel runs this process."""
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
