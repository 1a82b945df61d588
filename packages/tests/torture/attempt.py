"""One attempt: the demo's training in a process that reports what it does, and waits to be killed where it must.

Messages are JSON lines. `began` names what the attempt resumed from, `save` and `saved` frame each save,
`operation` and `done` before and after each operation on files, `ended` at the end of an attempt that was not killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import heliograph as h
from heliograph.core.checkpoint import storage
from heliograph.packages.tests.torture.files import WatchedFiles
from heliograph_recorder.demo import training


@dataclass(frozen=True, slots=True)
class Orders:
    """What an attempt is to do.

    Attributes:
        folder: where it trains.
        epochs: how many in all.
        workers: processes that load.
        background: whether it continues while a save is written.
        operation: the operation on files at which it waits to be killed; empty for none.
        occurrence: at which one of those, counted from 1.
        freezes: whether it stops there, or only reports and continues.
    """

    folder: str
    epochs: int
    workers: int
    background: bool = True
    operation: str = ""
    occurrence: int = 0
    freezes: bool = False


class Reporter:
    """Writes messages to a pipe, whole ones: they are short, and a write of so few bytes is atomic.

    Args:
        pipe: where to.
        orders: of this attempt.
    """

    def __init__(self, pipe: int, orders: Orders) -> None:
        self._pipe, self._orders, self._occurrences = pipe, orders, 0

    def report(self, what: str, **facts: Any) -> None:
        """Send a message."""
        os.write(self._pipe, json.dumps({"what": what, **facts}).encode() + b"\n")

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Report an operation before and after it; report that the time has come, if it has."""
        self.report("operation", name=name)
        if name == self._orders.operation:
            self._occurrences += 1
            if self._occurrences == self._orders.occurrence:
                self.report("now", name=name)
                if self._orders.freezes:
                    Event().wait()
        yield
        self.report("done", name=name)


class ReportingStore(storage.Store):
    """Reports every save."""

    def __init__(self, reporter: Reporter, folder: Path, run_name: str) -> None:
        super().__init__(folder, run_name, files=WatchedFiles(reporter.operation))
        self._reporter = reporter

    def save(self, name: str, state: Mapping[str, Any], **options: Any) -> storage.Entry:
        """Report and save."""
        self._reporter.report("save")
        entry = super().save(name, state, **options)
        self._reporter.report("saved", sequence=entry.sequence)
        return entry


def run_attempt(orders: Orders, pipe: int) -> None:
    """Train from the newest checkpoint on, until the end or until killed."""
    reporter = Reporter(pipe, orders)
    folder = Path(orders.folder)
    with patch.object(storage, "Store", partial(ReportingStore, reporter)):
        deciding = training.training_plugins(folder, background=orders.background)
        trainer = h.Trainer([*deciding, *training.reporting_plugins(folder), _Beginning(reporter)], device="cpu")
        result = training.train(trainer, training.task(), orders.epochs, workers=orders.workers)
    assert result.resume is not None
    reasons = [*result.resume.reasons, *filter(None, [result.resume.divergence])]
    reporter.report("ended", status=result.status, reasons=reasons)


class _Beginning(h.Plugin):
    """Reports once where this attempt begins."""

    name = "beginning"
    affects_training = False

    def __init__(self, reporter: Reporter) -> None:
        self._reporter: Reporter | None = reporter

    @h.on(h.EpochStart)
    def report(self, run: h.Run, event: h.EpochStart) -> None:
        reporter, self._reporter = self._reporter, None
        if reporter is None:
            return
        path, notes = run.checkpoints.resumed_from, run.report.notes
        entry = None if path is None else storage.read_manifest(path)
        reporter.report(
            "began",
            sequence=0 if entry is None else entry.sequence,
            step=run.progress.steps,
            passed_over=[note for note in notes if note.startswith("skipped")],
        )


def command(orders: Orders, pipe: int) -> list[str]:
    """Return the command line of an attempt in an interpreter of its own."""
    # Not `-m`: the plugin's class would be one of `__main__` there, and the checkpoints say of which class a plugin is.
    code = f"from {__name__} import main; main()"
    return [sys.executable, "-c", code, json.dumps(asdict(orders)), str(pipe)]


def main() -> None:
    """Run the attempt that the command line orders."""
    run_attempt(Orders(**json.loads(sys.argv[1])), int(sys.argv[2]))
