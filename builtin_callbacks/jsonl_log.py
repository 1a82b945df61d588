"""A log file with one JSON object per line, for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO
from uuid import uuid4

from ..core.system.numbered_files import file_path, find_numbered, is_text, make_numbered, name_other
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.errors import describe_error
from ..plugins import Plugin, on

NOTHING: Final = "0:"


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
        self._began = False
        self._attempt = uuid4().hex[:8]
        self._lines = 0
        self._position, self._last = NOTHING, ""
        self._resumes = self._loaded = self._underway = False
        self._resumed_from = ""
        self._current: Path | None = None  # the file of the last training
        self._lost, self._error = 0, ""

    def reset(self) -> None:
        self._current, self._lost = None, 0
        self._began = self._resumes = self._loaded = self._underway = False
        self._attempt = uuid4().hex[:8]
        self._position, self._last = NOTHING, ""

    def describe(self, run: Run) -> str:
        return f"logs to {self._current or self.path}"

    def rehearse(self, folder: Path) -> list[Path]:
        original, self.path = self.path, folder / self.path.name
        return [original.parent]

    @on(ev.CheckpointLoaded)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Remove the lines after the checkpoint when the next line is written."""
        self._began, self._resumes = False, True
        self._resumed_from = str(event.path)
        self._current = None
        self.close()

    @on(ev.EpochStart)
    def note_beginning(self, run: Run, event: ev.EpochStart) -> None:
        """Record that the training has begun, so that its end is written."""
        self._underway = True

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
        if run.optimizer is not None and not (self._underway or self._resumes):
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
        return {"position": self._position, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position, self._last = state["position"], state["last"]
        self._loaded = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, run: Run, event: str, data: dict[str, Any]) -> None:
        place = {"epoch": run.progress.epoch, "step": run.progress.steps}
        training = None if run.optimizer is None else self._training(run)
        head = {"event": event, "time": datetime.now(UTC).isoformat(), "attempt": self._attempt, "training": training}
        line = json.dumps(head | {"run": run.name} | place | data)
        try:
            if self._file is None:
                self._file = self._open(run, fresh=event not in ("run_failed", "run_closed"))
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._lost, self._error = self._lost + 1, describe_error(error)
            raise
        self._lines += 1
        self._position, self._last = f"{self._lines}:{self._attempt}", line

    def _open(self, run: Run, *, fresh: bool) -> TextIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if run.optimizer is not None and self._current is None:
            self._current = self._choose(run)
        path = self._current or self.path
        if self._resumes and not self._began and run.optimizer is not None and fresh:
            self._cut(path, run.origin.epoch, run.origin.steps)
        self._began = self._began or fresh
        file = path.open("a", encoding="utf-8")
        if not _ends_well(path):
            file.write("\n")  # ends a line that was truncated by a kill
            file.flush()
        with path.open("rb") as written:
            self._lines = sum(1 for _ in written)
        return file

    def _choose(self, run: Run) -> Path:
        trainings = {path: self._training_in(path, run) for path in find_numbered(self.path) if is_text(path)}
        for wanted in (self._training(run), None):
            for path, training in trainings.items():
                if training == wanted:
                    return path
        path = make_numbered(self.path)
        if path != self.path:
            run.note(name_other(self.path, path))
        return path

    def _training(self, run: Run) -> str:
        return f"replay {self._attempt}" if run.report.is_replay else run.checkpoints.training_id

    def _training_in(self, path: Path, run: Run) -> str | None:
        """Return the training of a file's lines, or None.

        The training of the loaded state is recognized by the last line that the state has counted.
        """
        count, _, attempt = self._position.partition(":")
        first: str | None = None
        with path.open(encoding="utf-8") as file:
            for number, record in enumerate(map(_record, file), 1):
                if self._loaded and number == int(count) and record.get("attempt") == attempt:
                    return self._training(run)
                first = first if first is not None or not record else record["training"]
                if first is not None and not (self._loaded and number < int(count)):
                    break
        return first

    def _cut(self, path: Path, epoch: int, step: int) -> None:
        """Remove the lines of an earlier attempt after the position where this one begins.

        Lines that the checkpoint has counted remain. Of the others, lines of earlier steps remain; in another file,
        lines of the same step, too. Lines outside of a training remain. If the file was cut within the last counted
        line, that is written again.
        """
        lines = [(line, _record(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        number, _, attempt = self._position.partition(":")
        count = int(number)
        last = lines[count - 1][1] if 0 < count <= len(lines) else {"attempt": ""}
        is_counted = self._loaded and last.get("attempt") == attempt
        limit = (epoch, step) if is_counted else (epoch, step + 1)
        remaining = lines[: count if is_counted else 0]
        own_save = {"event": "checkpoint_saved", "path": self._resumed_from}  # written after the loaded snapshot
        for line, record in lines[len(remaining) :]:
            if record and (
                (record["epoch"], record["step"]) < limit
                or own_save.items() <= record.items()
                or record["training"] is None
            ):
                remaining.append((line, record))
        counted = {name: value for name, value in _record(self._last).items() if name != "training"}
        if lines and counted and not any(counted.items() <= record.items() for _, record in remaining):
            remaining.append((self._last, counted))
        aside = path.with_name(path.name + ".tmp")
        aside.write_text("".join(f"{line}\n" for line, _ in remaining), encoding="utf-8")
        aside.replace(path)


def _record(line: str) -> dict[str, Any]:
    """Return the position of a line; empty if the line was truncated by a kill."""
    try:
        record = json.loads(line)
        place = {name: record[name] for name in ("event", "epoch", "step", "attempt", "training")}
        return place | {"path": record.get("path")}
    except (ValueError, KeyError, TypeError):
        return {}


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
