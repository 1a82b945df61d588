"""A log file for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.checkpoint.storage import clean
from ..core.system.numbered_files import make_numbered
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_whole_number, describe_error
from ..plugins import Plugin, on

DECISIONS = ("stop", "end_epoch", "veto_stop", "veto_save", "skip_batch", "skip_step")


class FileLog(Plugin):
    """Write a readable log file of the run.

    The file is `<run>_<date>_<time>.log`; a resumed run appends to its own file. It contains the events of the run and
    the records of the logger `heliograph` and of `loggers`. Loggers with a higher level are set to `level` until the
    run closes, which also affects your own handlers without a level. The result has a warning if lines could not be
    written.

    Args:
        folder: the folder of the file; created if it does not exist.
        level: the lowest level that is written, such as `logging.INFO`.
        loggers: the names of more loggers, for example of your own modules; `root` stands for all. For Python's
            warnings, call `logging.captureWarnings(True)` and add `py.warnings`.
    """

    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, folder: str | Path, *, level: int = logging.INFO, loggers: Sequence[str] = ()) -> None:
        if isinstance(loggers, str) or not all(isinstance(name, str) for name in loggers):
            raise TypeError(f"FileLog takes names of loggers, as in loggers=['my_package']; got {loggers!r}.")
        self.folder = Path(folder)
        self.level = check_whole_number("level, such as logging.INFO,", level, at_least=0)
        self.loggers = tuple(loggers)
        self.path: Path | None = None
        self._handler: _Handler | None = None
        self._levels: dict[logging.Logger, int] = {}
        self._lost: list[str] = []  # the error of each missing line

    def describe(self, run: Run) -> str:
        return f"logs to {self.path or self.folder}"

    def rehearse(self, folder: Path) -> list[Path]:
        original, self.folder = self.folder, folder
        return [original]

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Start a new file for a new training."""
        self.path, self._lost = None, []

    @on(ev.EpochStart, ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM)
    def open(self, run: Run, event: ev.EpochStart | ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Open the file and add its handler to the loggers."""
        if self._handler is None:
            self._open(run)

    @on(ev.CheckpointLoaded, lane=Lane.REPORT)
    def write_resume(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Write where the run was resumed."""
        self._write(run, f"resumed at epoch {run.progress.epoch}, step {run.progress.steps} from {event.path}")

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT, optional=True)
    def write_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Write the metrics; after a prediction without any, the number of batches."""
        metrics = "  ".join(f"{name} {value:.6g}" for name, value in event.metrics.items())
        self._write(run, metrics or f"batches done: {run.progress.evaluated}")

    @on(ev.EpochEnd, lane=Lane.REPORT, optional=True)
    def write_epoch(self, run: Run, event: ev.EpochEnd) -> None:
        """Write that an epoch has ended."""
        self._write(run, f"epochs done: {run.progress.epoch}")

    @on(ev.CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: ev.CheckpointSaved) -> None:
        """Write the path of a checkpoint."""
        self._write(run, f"saved {event.path}{' (the best so far)' * event.is_best}")

    @on(ev.CheckpointPruned, lane=Lane.REPORT)
    def write_pruned(self, run: Run, event: ev.CheckpointPruned) -> None:
        """Write which checkpoint was removed."""
        self._write(run, f"removed {event.path}: {event.reason}")

    @on(ev.RunFailed)
    def write_failure(self, run: Run, event: ev.RunFailed) -> None:
        """Write the error with its traceback."""
        self._write(run, "failed", error=event.error)

    @on(ev.RunClosed, lane=Lane.REPORT, after=("jsonl_log", "tensorboard"))
    def write_end(self, run: Run, event: ev.RunClosed) -> None:
        """Write the decisions, the warnings and the status; warn about missing lines."""
        for request in run.control.history:
            if request.verb in DECISIONS or request.verb.startswith("withdraw"):
                self._write(run, f"asked: {request}")
        for warning in run.report.warnings:
            self._write(run, warning, level=logging.WARNING)
        self._write(run, f"closed: {event.status}")
        if self._lost:
            run.warn(f"Lines are missing ({len(self._lost)}) in {self.path}: {self._lost[-1]}.")
            self._lost.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"file": None if self.path is None else self.path.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["file"] is not None and (self.folder / state["file"]).exists():
            self.close()
            self.path = self.folder / state["file"]

    def close(self) -> None:
        handler, self._handler = self._handler, None
        if handler is None:
            return
        for logger in self._loggers():
            logger.removeHandler(handler)
        for logger, level in self._levels.items():
            logger.setLevel(level)
        handler.close()

    def _loggers(self) -> list[logging.Logger]:
        return [logging.getLogger(name) for name in dict.fromkeys(["heliograph", *self.loggers])]

    def _write(self, run: Run, text: str, error: BaseException | None = None, level: int = logging.INFO) -> None:
        place = f"[{run.phase} epoch {run.progress.epoch} step {run.progress.steps}]"
        level = logging.ERROR if error else level
        info = (type(error), error, error.__traceback__) if error else None
        record = logging.LogRecord("heliograph", level, __file__, 0, "%s %s", (place, text), info)
        handler = self._handler or self._open(run)
        if level >= self.level:  # to this file only, not to the user's handlers
            handler.handle(record)

    def _open(self, run: Run) -> _Handler:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path is None:
            self.path = make_numbered(self.folder / f"{clean(run.name)}_{datetime.now():%Y-%m-%d_%H-%M-%S}.log")
        handler = self._handler = _Handler(self.path, "a", "utf-8")
        handler.lost = self._lost
        handler.setLevel(self.level)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        loggers = self._loggers()
        self._levels = {logger: logger.level for logger in loggers if logger.getEffectiveLevel() > self.level}
        for logger in self._levels:
            logger.setLevel(max(self.level, 1))  # 0 would be the level of its parent
        for logger in loggers:
            logger.addHandler(handler)
        return handler


class _Handler(logging.FileHandler):
    """Writes a record once, even if it propagates to other loggers, and stores errors instead of printing them."""

    lost: list[str]
    _latest: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record is not self._latest:
            self._latest = record
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        error = sys.exception()
        if isinstance(error, Exception):
            self.lost.append(describe_error(error))
