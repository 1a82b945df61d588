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

from ..events import (
    CheckpointLoaded,
    CheckpointSaved,
    EpochStart,
    Lane,
    Log,
    Run,
    RunClosed,
    RunFailed,
    TestEnd,
    ValidationEnd,
)
from ..events.errors import describe_error
from ..plugins import Plugin, on

NOTHING: Final = "0:"


class JsonlLog(Plugin):
    """Write what happens to a file of JSON lines.

    There is a line for every log, validation, test, checkpoint and ending.

    Each line has `event`, `time` (UTC), `attempt` (a random name of the fit that wrote it), `run`, `epoch`, `step` and
    the event's data. A fresh fit overwrites the file. A resumed one appends to it, and first cuts off the lines that
    were written after its checkpoint, so no line is there twice; tests and validations on their own append.

    Args:
        path: the file; its folder is made where it is missing.
    """

    policy = "observer"
    draws = False
    ranks = "main"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._began = False
        self._attempt = uuid4().hex[:8]
        self._lines = 0
        self._position = NOTHING
        self._resumes = self._loaded = self._underway = False
        self._resumed_from = ""

    def reset(self) -> None:
        """Forget the former run; the new one has a name of its own."""
        self._began = self._resumes = self._loaded = self._underway = False
        self._attempt = uuid4().hex[:8]
        self._position = NOTHING

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Cut off what was written after the checkpoint when the next line comes."""
        self._began, self._resumes = False, True
        self._resumed_from = str(event.path)
        self.close()

    @on(EpochStart)
    def note_beginning(self, run: Run, event: EpochStart) -> None:
        """Note that training begins: the end of a run that was refused is not written among the lines of another."""
        self._underway = True

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT)
    def write_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Write metrics; JSON knows no NaN, so one is written as a string."""
        metrics = {name: float(value) if math.isfinite(value) else str(value) for name, value in event.metrics.items()}
        self._write(run, event.name, {"metrics": metrics})

    @on(CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: CheckpointSaved) -> None:
        """Write where a checkpoint lies."""
        self._write(run, event.name, {"path": str(event.path), "is_best": event.is_best})

    @on(RunFailed, RunClosed, lane=Lane.REPORT)
    def write_ending(self, run: Run, event: RunFailed | RunClosed) -> None:
        """Write how the run ended, with its warnings, and close with it."""
        if run.optimizer is not None and not (self._underway or self._resumes):
            return
        if isinstance(event, RunClosed):
            self._write(run, event.name, {"status": event.status, "warnings": list(run.warnings)})
        else:
            self._write(run, event.name, {"error": describe_error(event.error)})

    def state_dict(self) -> dict[str, Any]:
        """Return how many lines there are, and the attempt that wrote the last of them."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after them."""
        self._position, self._loaded = state["position"], True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, run: Run, event: str, data: dict[str, Any]) -> None:
        if self._file is None:
            self._open(run, fresh=event not in ("run_failed", "run_closed"))
        assert self._file is not None
        place = {"epoch": run.progress.epoch, "step": run.progress.steps}
        head = {"event": event, "time": datetime.now(UTC).isoformat(), "attempt": self._attempt, "run": run.name}
        self._file.write(json.dumps(head | place | data) + "\n")
        self._file.flush()
        self._lines += 1
        self._position = f"{self._lines}:{self._attempt}"

    def _open(self, run: Run, *, fresh: bool) -> None:
        """Open the file; a run that ends before it has anything to write does not touch what a former one wrote."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self._began and run.optimizer is not None and fresh:
            self._cut(run.origin.epoch, run.origin.steps)
        self._began = self._began or fresh
        self._file = self.path.open("a", encoding="utf-8")
        if not _ends_well(self.path):
            self._file.write("\n")  # after a line that a kill cut short
            self._file.flush()
        with self.path.open("rb") as file:
            self._lines = sum(1 for _ in file)

    def _cut(self, epoch: int, step: int) -> None:
        """Cut off what a former attempt wrote after the position where this one begins.

        The lines that the checkpoint counted stay; of others, those of earlier steps, and where it is of another file,
        those of its own step too.
        """
        lines = [(line, _record(line)) for line in self.path.read_text(encoding="utf-8").splitlines()]
        kept: list[tuple[str, dict[str, Any]]] = []
        if self._resumes:
            number, _, attempt = self._position.partition(":")
            count = int(number)
            last = lines[count - 1][1] if 0 < count <= len(lines) else {"attempt": ""}
            known = self._loaded and last.get("attempt") == attempt
            limit = (epoch, step) if known else (epoch, step + 1)
            kept = lines[: count if known else 0]
            rest = lines[len(kept) :]
            own = {"event": "checkpoint_saved", "path": self._resumed_from}  # written after the snapshot that it is of
            for line, record in rest:
                if record and ((record["epoch"], record["step"]) < limit or own.items() <= record.items()):
                    kept.append((line, record))
        aside = self.path.with_name(self.path.name + ".tmp")
        aside.write_text("".join(f"{line}\n" for line, _ in kept), encoding="utf-8")
        aside.replace(self.path)


def _record(line: str) -> dict[str, Any]:
    """Return what a line says of its place; nothing, where a kill cut it short."""
    try:
        record = json.loads(line)
        return {name: record[name] for name in ("event", "epoch", "step", "attempt")} | {"path": record.get("path")}
    except (ValueError, KeyError, TypeError):
        return {}


def _ends_well(path: Path) -> bool:
    """Return whether a file is empty or ends with a whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
