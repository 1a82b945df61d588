"""The progress of a run as plain lines, and the texts that bars have too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from ...core.host import is_preempted
from ...events import Status
from ...events.checks import count, printable
from ...events.progress import Rates

if TYPE_CHECKING:
    from ...events import Run

WIDTH = 80  # columns without a terminal
SPLITS = ("train", "validation", "test", "predict")


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


def columns(file: TextIO) -> int | None:
    """Return the width of a terminal; 0 if it has no size, None if it is unknown."""
    try:
        size = os.get_terminal_size(file.fileno())
        return size.columns if size.lines else 0
    except (OSError, ValueError, AttributeError):  # a replaced stream
        return None


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by split, losses first, then by name."""
    return dict(sorted(metrics.items(), key=lambda item: _rank(item[0])))


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
