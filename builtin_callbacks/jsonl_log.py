"""One JSON object a line, for programs to read."""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from ..events import CheckpointSaved, Lane, Log, Run, RunClosed, RunFailed, TestEnd, TrainStart, ValidationEnd
from ..plugins import Plugin, on


class JsonlLog(Plugin):
    """Write every log, validation, test, checkpoint and ending to a file of JSON lines.

    Each line has `event`, `time` (UTC), `attempt` (a random name of the fit that wrote it), `run`, `epoch`, `step` and
    the event's data. A fresh fit begins the file anew. A resumed one goes on in it, and first cuts off the lines beyond
    the step that it resumes at, so no step occurs twice; tests and validations on their own append.

    Args:
        path: the file; its folder is made where it is missing.
    """

    policy = "observer"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._began = False
        self._attempt = uuid4().hex[:8]

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Begin a new run."""
        self._began = False
        self._attempt = uuid4().hex[:8]

    @on(Log, ValidationEnd, TestEnd, lane=Lane.REPORT)
    def write_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd) -> None:
        """Write metrics; JSON knows no NaN, so one is written as a string."""
        metrics = {name: float(value) if math.isfinite(value) else str(value) for name, value in event.metrics.items()}
        self._write(run, event.name, {"metrics": metrics})

    @on(CheckpointSaved, lane=Lane.REPORT)
    def write_checkpoint(self, run: Run, event: CheckpointSaved) -> None:
        """Write where a checkpoint lies."""
        self._write(run, event.name, {"path": str(event.path), "is_best": event.is_best})

    @on(RunFailed, RunClosed)
    def write_ending(self, run: Run, event: RunFailed | RunClosed) -> None:
        """Write how the run ended, and close with it."""
        text = event.status if isinstance(event, RunClosed) else f"{type(event.error).__name__}: {event.error}"
        self._write(run, event.name, {"status" if isinstance(event, RunClosed) else "error": text})

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

    def _open(self, run: Run, *, fresh: bool) -> None:
        """Open the file; a run that ends before it has anything to tell does not touch what a former one wrote."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and not self._began and run.optimizer is not None and fresh:
            self._keep_up_to(run.origin.epoch, run.origin.steps)
        self._began = self._began or fresh
        self._file = self.path.open("a", encoding="utf-8")
        if not _ends_well(self.path):
            self._file.write("\n")  # behind a line that a kill cut short

    def _keep_up_to(self, epoch: int, step: int) -> None:
        """Cut off what a former attempt wrote beyond the position that this one begins at."""
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                if step and (record["epoch"], record["step"]) <= (epoch, step):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):  # a line that a kill cut short
                continue
        aside = self.path.with_name(self.path.name + ".tmp")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        aside.replace(self.path)


def _ends_well(path: Path) -> bool:
    """Return whether a file is empty or ends with a whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() in (b"", b"\n")
