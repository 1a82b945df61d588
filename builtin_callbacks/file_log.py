"""A log file for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.checkpoint.storage import clean
from ..events import (
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
    Run,
    RunClosed,
    RunFailed,
    TestEnd,
    TestStart,
    TrainStart,
    ValidationEnd,
    ValidationStart,
)
from ..events.checks import check_flag, check_whole_number
from ..plugins import Plugin, on


class FileLog(Plugin):
    """Write what happens to a log file.

    The file is `<run>_<date>_<time>.log`; a resumed run appends to the file that it began.

    Everything that is logged through the logger `heliograph` (warnings of plugins, say) goes to the same file, and with
    `capture_warnings` python's warnings too. The handlers are removed when the run closes.

    Args:
        folder: where to write; made where it is missing.
        level: the least level that is written, such as `logging.INFO`.
        capture_warnings: whether python's warnings are written too.
    """

    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, folder: str | Path, *, level: int = logging.INFO, capture_warnings: bool = False) -> None:
        check_flag("capture_warnings", capture_warnings)
        self.folder = Path(folder)
        self.level = check_whole_number("level, such as logging.INFO,", level, at_least=0)
        self.capture_warnings = capture_warnings
        self.path: Path | None = None
        self._handler: _Handler | None = None
        self._captured_before = False

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Name the run's file; it is made at the first line."""
        self.path = self._new_path(run)

    @on(EpochStart, ValidationStart, TestStart, lane=Lane.TRANSFORM)
    def open(self, run: Run, event: EpochStart | ValidationStart | TestStart) -> None:
        """Take in what others log from now on."""
        if self._handler is None:
            self._open(run)

    @on(CheckpointLoaded, lane=Lane.REPORT)
    def write_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Write where the run continues."""
        self._write(run, f"resumed at epoch {run.progress.epoch}, step {run.progress.steps} from {event.path}")

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT, optional=True)
    def write_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Write metrics."""
        self._write(run, "  ".join(f"{name} {value:.6g}" for name, value in event.metrics.items()))

    @on(EpochEnd, lane=Lane.REPORT, optional=True)
    def write_epoch(self, run: Run, event: EpochEnd) -> None:
        """Write that an epoch is over."""
        self._write(run, f"epochs done: {run.progress.epoch}")

    @on(CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: CheckpointSaved) -> None:
        """Write where a checkpoint lies."""
        self._write(run, f"saved {event.path}{' (the best so far)' * event.is_best}")

    @on(CheckpointPruned, lane=Lane.REPORT)
    def write_pruned(self, run: Run, event: CheckpointPruned) -> None:
        """Write which checkpoint was removed."""
        self._write(run, f"removed {event.path}: {event.reason}")

    @on(RunFailed)
    def write_failure(self, run: Run, event: RunFailed) -> None:
        """Write the error with its traceback."""
        self._write(run, "failed", error=event.error)

    @on(RunClosed, lane=Lane.REPORT)
    def write_end(self, run: Run, event: RunClosed) -> None:
        """Write how the run ended, who asked for what, and what did not happen."""
        for request in run.control.history:
            if request.verb in ("stop", "end_epoch", "veto_stop", "skip_batch", "skip_step"):
                self._write(run, f"asked: {request}")
        for warning in run.warnings:
            self._write(run, warning, level=logging.WARNING)
        self._write(run, f"closed: {event.status}")

    def state_dict(self) -> dict[str, Any]:
        """Return the file's name."""
        return {"file": None if self.path is None else self.path.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Append to the file of the run that is resumed, if it is still there."""
        if state["file"] is not None and (self.folder / state["file"]).exists():
            self.close()
            self.path = self.folder / state["file"]

    def close(self) -> None:
        """Remove the handlers and close the file."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        for name in self._loggers():
            logging.getLogger(name).removeHandler(handler)
        if self.capture_warnings and not self._captured_before:
            logging.captureWarnings(False)
        handler.close()

    def _new_path(self, run: Run) -> Path:
        return self.folder / f"{clean(run.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}.log"

    def _loggers(self) -> list[str]:
        return ["heliograph", "py.warnings"] if self.capture_warnings else ["heliograph"]

    def _write(self, run: Run, text: str, error: BaseException | None = None, level: int = logging.INFO) -> None:
        if self._handler is None:
            self._open(run)
        place = f"[{run.phase} epoch {run.progress.epoch} step {run.progress.steps}]"
        level = logging.ERROR if error else level
        info = (type(error), error, error.__traceback__) if error else None
        record = logging.LogRecord("heliograph", level, __file__, 0, "%s %s", (place, text), info)
        if self._handler is not None and level >= self.level:  # to this file only: the user's own handlers are his
            self._handler.failure = None  # one of another's lines, that the disk may have recovered from
            self._handler.handle(record)
            if self._handler.failure is not None:
                raise self._handler.failure

    def _open(self, run: Run) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.path or self._new_path(run)
        self._handler = _Handler(self.path, encoding="utf-8")
        self._handler.setLevel(self.level)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        for name in self._loggers():
            logging.getLogger(name).addHandler(self._handler)
        if self.capture_warnings:
            self._captured_before = getattr(logging, "_warnings_showwarning", None) is not None
            logging.captureWarnings(True)


class _Handler(logging.FileHandler):
    """Keeps an error of writing for the plugin to raise, instead of a traceback on the terminal for every line."""

    failure: Exception | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exception()
        self.failure = error if isinstance(error, Exception) else self.failure
