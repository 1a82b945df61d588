"""`Checkpoint` saves a run and resumes it, as `Resume` says; `WeightsCheckpoint` saves weights for use."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...core.checkpoint.schema import CHANGES, BatchChange
from ...core.checkpoint.storage import Entry
from ...core.distributed.outcomes import on_main
from ...plugins.filters import Filter
from .folder import ON_EXISTING, OnExisting
from .saver import Saver, count_steps
from .verify_resume import VerifyResume

if TYPE_CHECKING:
    from ...events import Run
    from .resume import ResumePoint


@dataclass(frozen=True, slots=True)
class Resume:
    """What a `Checkpoint` resumes: `Checkpoint("runs/x", resume=Resume("auto", batch_change="linear"))`.

    `resume="auto"` is short for `Resume("auto")`, and a path for `Resume(path)`.

    Args:
        path: `auto` resumes the newest intact checkpoint of this run's name, if there is one, and notes which files it
            skipped; a path resumes that file, as a branch if the folder has a newer checkpoint of its training; None
            starts fresh.
        batch_change: what to do if the resumed run has another global batch (ranks x batch size x accumulation):
            `refuse` it, except from one process to one, which the result notes; `keep` the saved learning rates; scale
            them in proportion (`linear`) or with the square root (`sqrt`) of the ratio. If the batch size is unknown,
            nothing is refused or scaled.
        on_existing: what a run that starts fresh does if the folder holds another training under the run's name: write
            under a `new_name` (`run-2`, with a note in the result), `refuse` to start, or `replace` it: its checkpoints
            are removed when the first one of this run is written, unless they are pinned.

    Raises:
        TypeError: `path` is not a path.
        ValueError: an option is unknown, or `path` is neither a file nor the name of one.
    """

    path: str | Path | None = "auto"
    batch_change: BatchChange = "refuse"
    on_existing: OnExisting = "new_name"

    def __post_init__(self) -> None:
        path = self.path
        if not isinstance(path, str | Path | None):
            raise TypeError(f"resume is 'auto', the path of a checkpoint, a Resume, or None; got {path!r}.")
        if isinstance(path, str) and path != "auto" and not Path(path).suffix and not Path(path).exists():
            raise ValueError(f"resume is None, 'auto', or the path of a checkpoint's .pth file, got {path!r}.")
        if self.batch_change not in CHANGES:
            raise ValueError(f"batch_change is one of {', '.join(CHANGES)}; got {self.batch_change!r}.")
        if self.on_existing not in ON_EXISTING:
            raise ValueError(f"on_existing is one of {', '.join(ON_EXISTING)}; got {self.on_existing!r}.")


class Checkpoint(Saver):
    """Save the state of a run in files, and resume from them.

    Every save point writes `<run_name>_epoch_<epoch>_iter_<step>[_<label>].pth`, with the number of finished epochs and
    steps and the label of `CheckpointLabel`.

    A checkpoint is written to a hidden file in the same folder, synced and renamed; only then are older ones removed.
    The newest, the best and pinned checkpoints are never removed, nor checkpoints of another training. A failed save
    raises and leaves the previous checkpoints unchanged. During the run, no other process can write checkpoints of its
    name to the folder.

    On several ranks the main rank (0) writes one file for all, unless the engine's `state` is `"sharded"`. A save that
    fails raises on all ranks at the same step. If a rank cannot see a file, the main rank sends it.

    Args:
        folder: where to write; created if it is missing. A URL such as `s3://bucket/run` needs heliograph-storage: the
            checkpoints are written to `runs/s3/bucket/run` and copied there in the background.
        every: when to save, for example `Every(epochs=1)`, `Every(seconds=600)` or `At(fraction=[0.5, 0.9])`; the end
            of the training is saved, too. None saves only when another plugin requests it, for example `SaveSchedule`;
            if both are due at a boundary, one checkpoint is written.
        keep_last: how many of the newest to keep, not counting pinned ones; None keeps all.
        keep_best: how many of the best by `monitor` to keep in addition. Only a save at the step at which the metric
            was measured competes, so a value never ranks other weights.
        monitor: the metric that ranks the checkpoints for `keep_best`, for example `validation/loss`. Without
            validation data, the result warns that there is no best one.
        mode: whether smaller (`min`) or larger (`max`) is better; optional for a loss or an error.
        resume: None starts fresh; `auto` resumes the newest intact checkpoint of this run's name, if there is one, and
            notes which files it skipped; a path resumes that file, as a branch if the folder has a newer checkpoint of
            its training. A `Resume` object has more options.
        background: the loop only copies the state, and continues while it is written. Saves do not overlap: the next
            one waits, and the result notes how long. `CheckpointSaved` is emitted when the file is durable, at the end
            of a later batch, and `CheckpointPruned` after older ones are removed; an error of the writing is raised
            there, too. Needs additional memory of the size of the state.

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
        retention: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best, "monitor": monitor, "mode": mode}
        super().__init__(folder, every=every, background=background, **retention)
        self.resume = resume if isinstance(resume, Resume) else Resume(resume)
        self._on_existing = self.resume.on_existing
        path = str(self.resume.path)
        if self._remote is None and "://" in path:
            raise ValueError(
                f"resume={path!r} is a URL, and {folder} is a folder of this machine: pass the URL of the run's folder "
                f"first, Checkpoint({path.rpartition('/')[0]!r}, resume={path!r})."
            )

    def rehearse(self, folder: Path) -> list[Path]:
        """Write to `folder`, and resume only from there; raise if a checkpoint to resume cannot be read."""
        if self.resume.path not in (None, "auto") and "://" not in str(self.resume.path):
            from ...core.checkpoint.storage.reader import load  # imported in a rehearsal

            load(Path(self.resume.path))
        self.resume = replace(self.resume, path="auto")
        return super().rehearse(folder)

    def _start(self, run: Run) -> None:
        point: ResumePoint | None = None

        def look() -> tuple[str, str, Path | None, list[str], str]:
            nonlocal point
            store, resume, fetched = self._files.open(run, self.folder), self.resume.path, list[str]()
            if self._remote is not None:
                resume, fetched = self._remote.fetch(store, resume)
            with store.steady() if run.checkpoints.source is None else nullcontext():  # a source adds files
                training_id, name, notes = run.checkpoints.training_id, run.name, list[str]()
                if resume is not None or run.checkpoints.source is not None:
                    from .resume import find  # imported when a run may resume

                    point = find(store, resume, run.checkpoints.source)
                    training_id, name, notes = point.choose_training(run.name, training_id)
                    self._files.damaged = point.damaged
                path, newer, warning = (None, "", "") if point is None else (point.path, point.newer, point.warning)
                if path is not None or not run.checkpoints.is_resuming:  # another plugin chose the training
                    notes += self._claim(run, name, training_id, is_branch=bool(newer))
            if self._remote is not None:
                self._remote.check(store)
            return training_id, self._files.name, path, [*fetched, *notes], warning

        run.checkpoints.training_id, self.file_name, path, notes, warning = on_main(run.engine, look)
        for note in notes:
            run.note(note)
        if warning:
            run.warn(warning)
        if path is not None:
            from .resume import share_state  # imported when a run resumes, on every rank

            state = share_state(run.engine, path, None if point is None else point.state)
            choices = {"training_id": run.checkpoints.training_id, "batch_change": self.resume.batch_change}
            run.resume({**state, **choices}, path)

    def _continue(self, run: Run, path: Path | None, newest: Entry | None, *, is_newest: bool) -> None:
        if path is None:
            return
        self._saved.path = run.checkpoints.last = path
        self._saved.steps, self._saved.is_newest_of_training = run.progress.steps, is_newest
        if is_newest:  # the run may have been killed between its last save and the removal of old ones
            self._tidy(run, None, is_new=False)

    def _lost(self, run: Run) -> str | None:
        steps, path, saved_at = run.progress.steps, self._saved.path, self._saved.steps
        if path is None or saved_at is None:
            return f"no checkpoint was written: {count_steps(steps)} lost" if steps else None
        if not path.exists():
            return f"the newest checkpoint was {path}, of step {saved_at}, and is missing: no run can resume it"
        loss = f"{count_steps(steps - saved_at)} lost" if steps > saved_at else "no step is lost"
        how = f"Checkpoint({str(self._remote.url if self._remote else self.folder)!r}, resume={str(path)!r})"
        if self.resume.path == "auto" and path.parent.resolve() == self.folder.resolve():
            how = "start the program again"
        return f"the newest checkpoint is {path}, of step {saved_at}, {loss}; to resume it, {how}"


class WeightsCheckpoint(Saver):
    """Save only the weights, for use; a run cannot resume them.

    The files are small: the weights with an average of them, the counters and the metrics. `load_weights`,
    `trainer.test(weights=...)` and the command `checkpoint export` of heliograph-cli read them. Names and retention are
    as for `Checkpoint`. To resume the training, also register a `Checkpoint` in another folder.

    Args:
        folder: as for `Checkpoint`.
        every: as for `Checkpoint`.
        keep_last: as for `Checkpoint`.
        keep_best: as for `Checkpoint`.
        monitor: as for `Checkpoint`.
        mode: as for `Checkpoint`.
        background: as for `Checkpoint`.

    Raises:
        ValueError: as for `Checkpoint`.
        OSError: a save failed.
    """

    weights_only: ClassVar[bool] = True

    def _start(self, run: Run) -> None:
        if not any(isinstance(plugin, Checkpoint) and run.plugins.is_enabled(plugin) for plugin in run.plugins):
            run.data.report_untracked("everything but weights", "WeightsCheckpoint saves no state to resume")
        on_main(run.engine, partial(self._open, run))

    def _open(self, run: Run) -> None:
        self._files.open(run, self.folder)

    def _continue(self, run: Run, path: Path | None, newest: Entry | None, *, is_newest: bool) -> None:
        if newest is not None:
            self._saved.path, self._saved.steps = newest.path, int(newest.progress["steps"])

    def _lost(self, run: Run) -> str | None:
        if self._saved.path is None:
            return "no weights were saved, and no checkpoint that can be resumed"
        return (
            f"the newest weights are {self._saved.path}, of step {self._saved.steps}; only weights are saved, so the "
            f"run cannot be resumed"
        )
