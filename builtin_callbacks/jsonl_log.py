"""A log file with one JSON object per line, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from ..core.system.numbered_files import file_path, find_numbered, is_text, make_numbered, name_other
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import describe_error
from ..plugins import Plugin, on


class JsonlLog(Plugin):
    """Write a file of JSON lines for programs to read.

    There is a line for every log, validation, test, prediction, checkpoint and end of a run. Each has `event`, `time`
    (UTC), `attempt` (a random name of the call of `fit`), `training` (equal in all attempts of a training, null outside
    of one), `run`, `epoch`, `step` and the data of the event.

    Lines of another training are never removed: if `log.jsonl` contains one, a new training writes `log-2.jsonl` and
    notes this in the result. A resumed training appends to its own file, after removing the lines that were written
    after its checkpoint, so no line is duplicated. Separate tests, predictions and validations append. The result has a
    warning if lines could not be written.

    Args:
        path: the file; its folder is created if it does not exist.
    """

    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, path: str | Path) -> None:
        self.path = file_path(path, "JsonlLog", "log.jsonl")
        self.exclusive = (f"the log {self.path.absolute()}",)
        self._file: TextIO | None = None
        self.reset()

    def reset(self) -> None:
        self._attempt = uuid4().hex[:8]
        self._current: Path | None = None  # the file of the last training
        self._lines: int | None = 0  # of the training; None if unknown
        self._saved_lines: int | None = None  # in the loaded state
        self._cut_at: int | None = None  # the lines of the training that remain when the next one is written
        self._resumed_from = ""
        self._is_underway = False
        self._lost, self._error = 0, ""

    def describe(self, run: Run) -> str:
        return f"logs to {self._current or self.path}"

    def rehearse(self, folder: Path) -> list[Path]:
        original, self.path = self.path, folder / self.path.name
        return [original.parent]

    @on(ev.CheckpointLoaded)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Remove the lines after the checkpoint when the next line is written."""
        self._lines = self._cut_at = self._saved_lines
        self._saved_lines = None
        self._current, self._resumed_from, self._is_underway = None, str(event.path), True
        self.close()

    @on(ev.EpochStart)
    def note_beginning(self, run: Run, event: ev.EpochStart) -> None:
        """Record that the training has begun, so that its end is written."""
        self._is_underway = True

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT)
    def write_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Write metrics; NaN and infinity are strings, because JSON has neither."""
        metrics = {name: float(value) if math.isfinite(value) else str(value) for name, value in event.metrics.items()}
        self._write(run, event.name, {"metrics": metrics})

    @on(ev.CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: ev.CheckpointSaved) -> None:
        """Write the path of a checkpoint."""
        self._write(run, event.name, {"path": str(event.path), "is_best": event.is_best})

    @on(ev.RunFailed, ev.RunClosed, lane=Lane.REPORT)
    def write_ending(self, run: Run, event: ev.RunFailed | ev.RunClosed) -> None:
        """Write the status, the warnings and the error; warn about missing lines."""
        if run.optimizer is not None and not self._is_underway:
            return
        if isinstance(event, ev.RunFailed):
            self._write(run, event.name, {"error": describe_error(event.error)})
            return
        try:
            self._write(run, event.name, {"status": event.status, "warnings": list(run.report.warnings)})
        finally:
            if self._lost:
                run.warn(f"Lines are missing ({self._lost}) in {self._current or self.path}: {self._error}.")

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self._lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lines = self._saved_lines = state["lines"]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, run: Run, event: str, data: dict[str, Any]) -> None:
        place = {"epoch": run.progress.epoch, "step": run.progress.steps}
        training = None
        if run.optimizer is not None:
            training = f"replay {self._attempt}" if run.report.is_replay else run.checkpoints.training_id
        head = {"event": event, "time": datetime.now(UTC).isoformat(), "attempt": self._attempt, "training": training}
        try:
            if self._file is None:
                self._file = self._open(run, training, cuts=event not in ("run_failed", "run_closed"))
            self._file.write(json.dumps(head | {"run": run.name} | place | data) + "\n")
            self._file.flush()
        except OSError as error:
            self._lost, self._error = self._lost + 1, describe_error(error)
            raise
        self._lines = (self._lines or 0) + (training is not None)

    def _open(self, run: Run, training: str | None, *, cuts: bool) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if training is not None and self._current is None:
            self._current = self._choose(run, training)
        path = self._current or self.path
        if cuts and training is not None and self._cut_at is not None:
            self._cut(path, training, self._cut_at)
            self._cut_at = None
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if training is not None:
            self._lines = sum(_record(line).get("training") == training for line in text.splitlines())
        file = path.open("a", encoding="utf-8")
        if text and not text.endswith("\n"):
            file.write("\n")  # ends a line that was truncated by a kill
        return file

    def _choose(self, run: Run, training: str) -> Path:
        trainings = {path: _training_in(path) for path in find_numbered(self.path) if is_text(path)}
        for wanted in (training, None):
            for path, found in trainings.items():
                if found == wanted:
                    return path
        path = make_numbered(self.path)
        if path != self.path:
            run.note(name_other(self.path, path))
        return path

    def _cut(self, path: Path, training: str, count: int) -> None:
        """Keep the first `count` lines of the training, the line of the loaded checkpoint, and all other lines."""
        remaining, own = [], 0
        own_save = {"event": "checkpoint_saved", "path": self._resumed_from}  # written after the state was captured
        for line in path.read_text(encoding="utf-8").splitlines():
            record = _record(line)
            is_own = record.get("training") == training
            own += is_own
            if record and (not is_own or own <= count or own_save.items() <= record.items()):
                remaining.append(f"{line}\n")
        aside = path.with_name(path.name + ".tmp")
        aside.write_text("".join(remaining), encoding="utf-8")
        aside.replace(path)


def _training_in(path: Path) -> str | None:
    with path.open(encoding="utf-8") as file:
        trainings = (_record(line).get("training") for line in file)
        return next((training for training in trainings if training is not None), None)


def _record(line: str) -> dict[str, Any]:
    """Return the fields of a line; empty if the line was truncated by a kill."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
