"""Save the run, keep the newest and the best, and resume."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ...core.checkpoint.storage import Entry
from ...core.distributed.failure import on_main
from ...events import Run
from ...plugins.filters import Filter
from .resume import Resume, ResumePoint, find, read, share_state
from .saver import Saver
from .verify_resume import VerifyResume


class Checkpoint(Saver):
    """Save the state of a run in files, and resume from them.

    Every save point writes `<run_name>_epoch_<epoch>_iter_<step>[_<label>].pth`: epochs and steps that are finished,
    and what `CheckpointLabel` adds.

    A checkpoint is written aside in the same folder, synced and renamed; only then are older ones removed. The newest
    is never removed, nor are the best, pinned checkpoints, and checkpoints of another training. A failed save raises
    and leaves the previous checkpoints as they were. While the run lasts, no other process may write checkpoints of its
    name to the folder.

    On several ranks the main rank (0) holds the folder and writes, one file for all, unless the engine's `state` is
    `"sharded"`; every rank is informed at the same step, and a save that fails raises on all of them. A file that not
    every rank can see is sent by the main rank.

    Args:
        folder: where to write; created if it is missing.
        every: when to save, such as `Every(epochs=1)`, `Every(seconds=600)` or `At(fraction=[0.5, 0.9])`; and at the
            end of the training. None leaves it to others to ask for saves, such as `SaveSchedule`; both together save
            once at a boundary.
        keep_last: how many of the newest to keep, pinned ones not counted; None keeps all.
        keep_best: how many of the best by `monitor` to keep as well. Only a save at the very step at which the metric
            was measured competes: a value is never taken for other weights.
        monitor: the metric that ranks the checkpoints for `keep_best`, such as `validation/loss`. Without validation
            data, the result warns that there is no best one.
        mode: whether smaller (`min`) or larger (`max`) is better; may be left out for a loss or an error.
        resume: None starts fresh; `auto` resumes the newest intact checkpoint of this run's name, if there is one, and
            notes what it skipped; a path resumes that file, as a branch if the folder has a newer checkpoint of its
            training. A `Resume` object says more.
        background: the loop only copies the state, and continues while it is written. One save at a time: the next one
            waits, and the result notes for how long. `CheckpointSaved` is emitted when the file is durable, at the end
            of a later batch, and `CheckpointPruned` when older ones are gone; an error of the writing is raised there,
            too. Takes as much memory again as the state.

    Attributes:
        is_branch: whether the run continues from a checkpoint that is not the newest of its training.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the folder cannot be written, another process
            writes this run's checkpoints there, or the path to resume from is damaged; when metrics are measured,
            `monitor` does not exist.
        FileNotFoundError: at the run's start, the path to resume from does not exist.
        OSError: a save failed.
    """

    brings = (VerifyResume,)

    def __init__(
        self,
        folder: str | Path,
        *,
        every: Filter | None = None,
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        resume: Resume | str | Path | None = None,
        background: bool = False,
    ) -> None:
        kept: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best, "monitor": monitor, "mode": mode}
        super().__init__(folder, every=every, background=background, **kept)
        self.resume = resume if isinstance(resume, Resume) else Resume(resume)
        self._on_existing = self.resume.on_existing
        self.is_branch = False
        self._untried = ""  # in a rehearsal, what is resumed outside of it

    def rehearse(self, folder: Path) -> list[Path]:
        """Write elsewhere, and resume only what was written there; a checkpoint that cannot be read is an error."""
        path, (before,) = self.resume.path, super().rehearse(folder)
        if path not in (None, "auto"):
            read(Path(path))
        if path is not None and (path != "auto" or any(before.glob("*.pth"))):
            self._untried = f"what resume={str(path)!r} finds for {before} is not loaded in a rehearsal"
        self.resume = replace(self.resume, path="auto")
        return [before]

    def _start(self, run: Run) -> None:
        point = ResumePoint()

        def look() -> tuple[str, str, Path | None, bool, list[str], str]:
            nonlocal point
            store = self._files.open(run, self.folder)
            with store.steady() if run.checkpoints.source is None else nullcontext():  # a source puts files there
                point = find(store, self.resume.path, run.checkpoints.source)
                training_id, name, notes = point.choose_training(run.name, run.checkpoints.training_id)
                self._files.damaged, self.is_branch = point.damaged, bool(point.newer)
                waits = run.checkpoints.is_resuming or (self.resume.path is None and _others_resume(run, self))
                if point.path is not None or not waits:  # else another plugin says which training it is
                    notes += self._claim(run, name, training_id)
                    if point.path is not None:
                        self._files.keep_newest()
            return training_id, self._files.name, point.path, self.is_branch, notes, point.warning

        self.is_branch = False
        run.checkpoints.training_id, self.file_name, path, self.is_branch, notes, warning = on_main(run.engine, look)
        for note in [*notes, *([self._untried] if self._untried else [])]:
            run.note(note)
        if warning:
            run.warn(warning)
        if path is not None:
            how = {"batch_change": self.resume.batch_change}
            state = share_state(run.engine, path, point.state)
            run.resume({**state, "training_id": run.checkpoints.training_id, **how}, path)

    def _continue(self, run: Run, path: Path | None, newest: Entry | None, *, is_newest: bool) -> None:
        if path is None:
            return
        self._saved.path = run.checkpoints.last = path
        self._saved.steps, self._saved.is_own = run.progress.steps, is_newest
        if is_newest:  # a kill may have come between the last save and its tidying, and nothing may be left to save
            self._tidy(run, None, is_new=False)

    def _lost(self, run: Run) -> str | None:
        return self._saved.lost(run, self.folder, resumes=self.resume.path == "auto")


def _others_resume(run: Run, plugin: Checkpoint) -> bool:
    """Return whether another plugin resumes from a path, which may start a new training."""
    others = (each for each in run.plugins if isinstance(each, Checkpoint) and run.plugins.is_enabled(each))
    return any(each.resume.path not in (None, "auto") for each in others if each is not plugin)
