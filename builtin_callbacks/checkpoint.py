"""Save the run, keep the newest and the best, and resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..core import storage
from ..core.monitor import Monitor
from ..core.saving import naming
from ..core.saving.best import Extent, load_best
from ..core.saving.retention import Retention
from ..core.saving.writers import BackgroundWriter, LoopWriter, Writer
from ..events import (
    CheckpointLoaded,
    CheckpointSaved,
    Lane,
    Log,
    Run,
    RunClosed,
    SavePoint,
    TrainEnd,
    TrainStart,
    ValidationEnd,
)
from ..plugins import Plugin, on


class Checkpoint(Plugin):
    """Write `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth` at every save point, and resume from such files.

    A save is written aside in the same folder, synced and renamed, its manifest last; only then are older ones removed.
    The newest is never removed, nor are the best and what is pinned. A save that fails raises and leaves the former
    ones as they were. While the run goes on, no other process may write checkpoints of its name to the folder.

    Args:
        folder: where to write; made where it is missing.
        metadata: the end of the name: a template of metric names such as `"accuracy_{validation/accuracy:.4f}"`, or a
            function of the run; by default what the task's `checkpoint_metadata(run)` returns, if it has one.
        keep_last: how many of the newest to keep, pinned ones not counted; None keeps all.
        keep_best: how many of the best by `monitor` to keep besides. Only a save at the very step at which the metric
            was measured competes: a value never stands for other weights.
        monitor: the metric that `keep_best` goes by, such as `validation/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; may be left out for a loss or an error.
        resume: None begins afresh, and leaves what an earlier run of this name wrote alone; `auto` goes on from the
            newest whole checkpoint of this run's name, if there is one, and notes what it passed over; a path goes on
            from that file.
        background: the loop only copies the state, and goes on while it is written. One save at a time: the next one
            waits, and the result notes for how long. `CheckpointSaved` is emitted when the file is durable, at the end
            of a later batch; an error of the writing is raised there, too. Takes as much memory again as the state.
        load_best: at the end of a run that completed or was stopped, load the best checkpoint back: only the `weights`,
            or `everything`, the optimizer and the scheduler too.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the folder cannot be written, another process
            writes this run's checkpoints there, or the path to resume from is damaged; at a save, a metric in
            `metadata` or `monitor` does not exist; at the end, the best checkpoint is damaged.
        FileNotFoundError: at the run's start, the path to resume from does not exist.
        OSError: a save failed.
    """

    needs = ("save",)

    def __init__(
        self,
        folder: str | Path,
        *,
        metadata: naming.Metadata | None = None,
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        resume: str | Path | None = None,
        background: bool = False,
        load_best: Extent | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (the newest is always kept), or None; got {keep_last!r}.")
        if keep_best < 0 or (keep_best > 0) != (monitor is not None):
            raise ValueError("keep_best=1 and monitor='validation/loss' go together: the best of what, and how many.")
        if load_best not in (None, "weights", "everything"):
            raise ValueError(f"load_best is 'weights', 'everything' or None, got {load_best!r}.")
        if load_best is not None and monitor is None:
            raise ValueError(
                f"load_best={load_best!r} needs keep_best=1 and monitor='validation/loss': the best of what?"
            )
        if not isinstance(folder, str | Path) or not isinstance(resume, str | Path | None):
            raise TypeError(f"Checkpoint takes paths: folder={folder!r}, resume={resume!r} ('auto', a path, or None).")
        if isinstance(resume, str) and resume != "auto" and not Path(resume).suffix and not Path(resume).exists():
            raise ValueError(f"resume is None, 'auto', or the path of a checkpoint's .pth file, got {resume!r}.")
        if isinstance(metadata, str):
            naming.fields(metadata)
        self.folder, self.metadata, self.resume, self.load_best = Path(folder), metadata, resume, load_best
        self.monitor = None if monitor is None else Monitor(monitor, mode)
        self.ignores = (Log, ValidationEnd) if self.monitor is None else self.monitor.ignores
        self._kept = Retention(keep_last, keep_best, self.monitor)
        self._writer: Writer = BackgroundWriter() if background else LoopWriter()
        self._store: storage.Store | None = None
        self._last: Path | None = None
        self._value: float | None = None
        self._value_at = -1

    @on(TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Take the folder, forget the former run, and find what to resume from."""
        self.close()  # a second interrupt may have left the former run's writing as it was
        self._last, self._value, self._value_at = None, None, -1
        if self.monitor is not None:
            self.monitor.check_measured(run)
        self._kept.begin(self._opened(run).entries()[0])
        self._writer.begin(run)
        if self.resume == "auto":
            self._resume_newest(run)
        elif self.resume is not None:
            path = Path(self.resume)
            run.resume(storage.load(path), path)

    @on(CheckpointLoaded, lane=Lane.PERSIST)
    def tell_kept(self, run: Run, event: CheckpointLoaded) -> None:
        """See what of this run is on disk, and tell it."""
        store = self._opened(run)
        entries, _ = store.entries()
        self._kept.resume(entries, event.path)
        if event.path is not None:
            self._last = run.last_checkpoint = event.path
        run.best_checkpoint = None if self._kept.best is None else self._kept.best.path
        if event.path is not None and entries and entries[0].path.resolve() == event.path.resolve():
            # A kill may have come between the last save and its tidying, and nothing may be left to save.
            best, doomed = run.best_checkpoint, self._kept.drop(store.is_pinned)
            self._writer.do(partial(_tidy, store, entries[0].path, best, doomed))

    @on(ValidationEnd, Log)
    def read(self, run: Run, event: ValidationEnd | Log) -> None:
        """Read the metric that the best are chosen by; it stands for the weights of this very step only."""
        if self.monitor is not None and self.monitor.is_for(event) and run.optimizer is not None:
            self._value, self._value_at = float(self.monitor.read(event.metrics)), run.progress.batches

    @on(SavePoint, lane=Lane.PERSIST)
    def save(self, run: Run, event: SavePoint) -> None:
        """Write; then, or when it is written, tell and remove what is no longer kept."""
        store, name = self._opened(run), naming.file_name(run, self.metadata)
        judged_by: storage.JudgedBy | None = None
        if self.monitor is not None and self._value_at == run.progress.batches:
            judged_by = self.monitor.name, self.monitor.mode, self._value
        state = self._writer.hold(run)
        self._writer.do(partial(store.save, name, state, judged_by=judged_by), partial(self._saved, run, store))

    @on(TrainEnd, lane=Lane.PERSIST)
    def wait(self, run: Run, event: TrainEnd) -> None:
        """Let an error of the writing fail the run."""
        self._writer.drain()

    @on(RunClosed, lane=Lane.PERSIST)
    def end(self, run: Run, event: RunClosed) -> None:
        """Finish the writing however the run ended, then load the best back if the run ended well."""
        if self._store is None:
            return
        self._writer.end(run)
        if self.load_best and self.monitor and event.status in ("completed", "stopped"):
            run.note(load_best(run, self._kept.best, self.monitor, self.load_best))

    def pin(self, path: str | Path | None = None) -> Path:
        """Keep a checkpoint for good; remove the file `<name>.pinned` beside it to let it go.

        Args:
            path: the checkpoint; by default the last one that was written.

        Returns:
            Where it lies.

        Raises:
            ValueError: nothing was written yet, or the file is no checkpoint.
            FileNotFoundError: there is no such file.
        """
        if path is None and self._last is None:
            raise ValueError("No checkpoint is written yet: pin one later, or give its path.")
        entry = storage.read_manifest(Path(path or self._last or ""))
        storage.Store(entry.path.parent, entry.run_name).pin(entry.path)
        return entry.path

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints are this run's, and the value by which its present state competes."""
        return {"since": self._kept.since, "value": self._value, "value_at": self._value_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; which checkpoints there are is read from the folder."""
        self._kept.since = state.get("since", 0)
        self._value, self._value_at = state.get("value"), state.get("value_at", -1)

    def close(self) -> None:
        """Finish the writing, and let others write to the folder; not while something is still being written."""
        try:
            self._writer.close()
        finally:
            if self._store is not None and self._writer.is_idle:
                self._store.close()
                self._store = None

    def _opened(self, run: Run) -> storage.Store:
        """Return the run's store; it is closed while the plugin is switched off."""
        if self._store is None:
            store = storage.Store(self.folder, run.name)
            for line in store.open():
                run.note(line)
            self._store = store
        return self._store

    def _resume_newest(self, run: Run) -> None:
        store = self._opened(run)
        entry, state, passed_over = store.newest()
        for line in passed_over:
            run.note(f"passed over: {line}")
            logging.getLogger("heliograph").warning("resume passed over: %s", line)
        if entry is not None and state is not None:
            run.resume(state, entry.path)
        elif unusable := store.count():
            note = f"begins afresh: none of the {unusable} checkpoints of {run.name!r} in {self.folder} can be used"
            run.note(note)
            logging.getLogger("heliograph").warning(note)
        else:
            run.note(f"begins afresh: no checkpoint of {run.name!r} in {self.folder}")

    def _saved(self, run: Run, store: storage.Store, entry: storage.Entry) -> None:
        """Tell of a durable checkpoint, then point to it and remove what is no longer kept."""
        self._kept.add(entry)
        best = None if self._kept.best is None else self._kept.best.path
        self._last = run.last_checkpoint = entry.path
        run.best_checkpoint = best
        run.emit(CheckpointSaved(entry.path, is_best=best == entry.path))
        self._writer.do(partial(_tidy, store, entry.path, best, self._kept.drop(store.is_pinned)))


def _tidy(store: storage.Store, last: Path, best: Path | None, doomed: list[Path]) -> None:
    store.point("last", last)
    store.point("best", best)
    for path in doomed:
        store.remove(path)
