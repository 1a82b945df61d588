"""Plain lines, for a log file or where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from ...core.system.extras import printable
from ...events import Run
from ...events.catalogue import Status
from ...events.errors import count
from . import text
from .pace import Pace, duration


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
