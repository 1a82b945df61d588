"""One JSON object a line, for programs to read."""

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
    """Write what happens to a file of JSON lines.

    There is a line for every log, validation, test, prediction, checkpoint and ending.

    Each line has `event`, `time` (UTC), `attempt` (a random name of the fit that wrote it), `training` (the same in all
    attempts of a training, null outside of one), `run`, `epoch`, `step` and the event's data. Nothing of another
    training is removed: where `log.jsonl` holds one, a fresh fit writes `log-2.jsonl`, and notes that in the result. A
    resumed one appends to its own file, and first cuts off the lines that were written after its checkpoint, so no line
    is there twice; tests, predictions and validations on their own append. Lines that could not be written are a
    warning.

    Args:
        path: the file; its folder is made where it is missing.
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
        former, self.path = self.path, folder / self.path.name
        return [former.parent]

    @on(ev.CheckpointLoaded)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Cut off what was written after the checkpoint when the next line comes."""
        self._began, self._resumes = False, True
        self._resumed_from = str(event.path)
        self._current = None
        self.close()

    @on(ev.EpochStart)
    def note_beginning(self, run: Run, event: ev.EpochStart) -> None:
        """Note that training begins: the end of a run that was refused is not written among the lines of another."""
        self._underway = True

    @on(ev.Log, ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.REPORT)
    def write_metrics(self, run: Run, event: ev.Log | ev.ValidationEnd | ev.TestEnd | ev.PredictEnd) -> None:
        """Write metrics; JSON knows no NaN, so one is written as a string."""
        metrics = {name: float(value) if math.isfinite(value) else str(value) for name, value in event.metrics.items()}
        self._write(run, event.name, {"metrics": metrics})

    @on(ev.CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: ev.CheckpointSaved) -> None:
        """Write where a checkpoint lies."""
        self._write(run, event.name, {"path": str(event.path), "is_best": event.is_best})

    @on(ev.RunFailed, ev.RunClosed, lane=Lane.REPORT)
    def write_ending(self, run: Run, event: ev.RunFailed | ev.RunClosed) -> None:
        """Write how the run ended, with its warnings, and close with it; say how many lines are missing."""
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
        """Open the file; what a former attempt wrote is cut off when there is something to write in its place."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if run.optimizer is not None and self._current is None:
            self._current = self._choose(run)
        path = self._current or self.path
        if self._resumes and not self._began and run.optimizer is not None and fresh:
            self._cut(path, run.origin.epoch, run.origin.steps)
        self._began = self._began or fresh
        file = path.open("a", encoding="utf-8")
        if not _ends_well(path):
            file.write("\n")  # after a line that a kill cut short
            file.flush()
        with path.open("rb") as written:
            self._lines = sum(1 for _ in written)
        return file

    def _choose(self, run: Run) -> Path:
        """Return the file of a training: its own where it is resumed, else one that holds no other."""
        trainings = {each: self._training_in(each, run) for each in find_numbered(self.path) if is_text(each)}
        for wanted in (self._training(run), None):
            for each, training in trainings.items():
                if training == wanted:
                    return each
        path = make_numbered(self.path)
        if path != self.path:
            run.note(name_other(self.path, path))
        return path

    def _training(self, run: Run) -> str:
        return f"replay {self._attempt}" if run.report.is_replay else run.checkpoints.training_id

    def _training_in(self, path: Path, run: Run) -> str | None:
        """Return whose lines a file holds, None for no training's; one that the state counted is of this training."""
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
        """Cut off what a former attempt wrote after the position where this one begins.

        The lines that the checkpoint counted stay; of others, those of earlier steps, and where it is of another file,
        those of its own step too. What was evaluated outside of a training stays. The last line that the checkpoint
        counted is written again where the file was cut within it.
        """
        lines = [(line, _record(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        number, _, attempt = self._position.partition(":")
        count = int(number)
        last = lines[count - 1][1] if 0 < count <= len(lines) else {"attempt": ""}
        known = self._loaded and last.get("attempt") == attempt
        limit = (epoch, step) if known else (epoch, step + 1)
        kept = lines[: count if known else 0]
        own = {"event": "checkpoint_saved", "path": self._resumed_from}  # written after the snapshot that it is of
        for line, record in lines[len(kept) :]:
            if record and (
                (record["epoch"], record["step"]) < limit or own.items() <= record.items() or record["training"] is None
            ):
                kept.append((line, record))
        counted = {name: value for name, value in _record(self._last).items() if name != "training"}
        if lines and counted and not any(counted.items() <= record.items() for _, record in kept):
            kept.append((self._last, counted))
        aside = path.with_name(path.name + ".tmp")
        aside.write_text("".join(f"{line}\n" for line, _ in kept), encoding="utf-8")
        aside.replace(path)


def _record(line: str) -> dict[str, Any]:
    """Return what a line says of its place; nothing, where a kill cut it short."""
    try:
        record = json.loads(line)
        place = {name: record[name] for name in ("event", "epoch", "step", "attempt", "training")}
        return place | {"path": record.get("path")}
    except (ValueError, KeyError, TypeError):
        return {}


def _ends_well(path: Path) -> bool:
    """Return whether a file is empty or ends with a whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
