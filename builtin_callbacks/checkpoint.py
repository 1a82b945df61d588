"""Save the run, keep the newest and the best, and resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from ..core import storage
from ..core.monitor import Monitor
from ..events import CheckpointLoaded, CheckpointSaved, Lane, Log, Run, SavePoint, TrainStart, ValidationEnd
from ..events.checks import known_names
from ..plugins import Plugin, on

Metadata = str | Callable[[Run], str]


class Checkpoint(Plugin):
    """Write `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth` at every save point, and resume from such files.

    A save is written aside in the same folder, synced and renamed; only then are older ones removed. The newest is
    never removed, and neither is the best. A save that fails raises and leaves the former ones as they were.

    Args:
        folder: where to write; made where it is missing.
        metadata: the end of the name: a template of metric names such as `"accuracy_{validation/accuracy:.4f}"`, or a
            function of the run; by default what the task's `checkpoint_metadata(run)` returns, if it has one.
        keep_last: how many of the newest to keep; None keeps all.
        keep_best: how many of the best by `monitor` to keep besides. Only a save at the very step at which the metric
            was measured competes: a value never stands for other weights.
        monitor: the metric that `keep_best` goes by, such as `validation/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; may be left out for a loss or an error.
        resume: None begins afresh; `auto` goes on from the newest readable checkpoint of this run's name, if there is
            one, and notes what it passed over; a path goes on from that file.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the folder cannot be written; at a save, a
            metric in `metadata` or `monitor` does not exist.
        FileNotFoundError: at the run's start, the path to resume from does not exist.
        OSError: a save failed.
    """

    needs = ("save",)

    def __init__(
        self,
        folder: str | Path,
        *,
        metadata: Metadata | None = None,
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        resume: str | Path | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1 (the newest is always kept), or None; got {keep_last!r}.")
        if keep_best < 0 or (keep_best > 0) != (monitor is not None):
            raise ValueError("keep_best=1 and monitor='validation/loss' go together: the best of what, and how many.")
        if not isinstance(folder, str | Path) or not isinstance(resume, str | Path | None):
            raise TypeError(f"Checkpoint takes paths: folder={folder!r}, resume={resume!r} ('auto', a path, or None).")
        if isinstance(metadata, str):
            _fields(metadata)
        self.folder = Path(folder)
        self.metadata, self.keep_last, self.keep_best, self.resume = metadata, keep_last, keep_best, resume
        self.monitor = None if monitor is None else Monitor(monitor, mode)
        self._saved: list[Path] = []
        self._best: list[tuple[float, Path]] = []
        self._value: float | None = None
        self._value_at = -1

    @on(TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Try the folder, forget the former run, and find what to resume from."""
        storage.prepare_folder(self.folder)
        self._saved, self._best = [], []
        self._value, self._value_at = None, -1
        if self.monitor is not None:
            self.monitor.check_measured(run)
        if self.resume == "auto":
            self._resume_newest(run)
        elif self.resume is not None:
            path = Path(self.resume)
            run.resume(storage.load(path), path)

    @on(ValidationEnd, Log)
    def read(self, run: Run, event: ValidationEnd | Log) -> None:
        """Read the metric that the best are chosen by; it stands for the weights of this very step only."""
        if self.monitor is not None and self.monitor.is_for(event) and run.optimizer is not None:
            self._value, self._value_at = self.monitor.read(event.metrics), run.progress.batches

    @on(SavePoint, lane=Lane.PERSIST)
    def save(self, run: Run, event: SavePoint) -> None:
        """Write, then tell, then remove what is no longer kept."""
        progress = run.progress
        name = storage.checkpoint_name(run.name, progress.epoch, progress.steps, self._metadata_of(run))
        path = self.folder / name
        value = self._value if self._value_at == progress.batches else None
        before = list(self._saved), list(self._best)
        doomed = self._rank(path, value)
        try:
            storage.save(path, run.state_dict())
        except BaseException:  # an interrupt too: the lists must not name a file that is not there
            self._saved, self._best = before
            raise
        run.last_checkpoint = path
        is_best = bool(self._best) and self._best[0][1] == path
        if is_best:
            run.best_checkpoint = path
        run.emit(CheckpointSaved(path, is_best))
        for old in doomed:
            old.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, by name, so that a resumed run goes on pruning."""
        best = [[score, path.name] for score, path in self._best]
        return {"saved": [path.name for path in self._saved], "best": best, "judged_by": self._judged_by()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what of it is still on disk."""
        self._saved = [self.folder / name for name in state["saved"] if (self.folder / name).exists()]
        best = [(score, self.folder / name) for score, name in state["best"] if (self.folder / name).exists()]
        if state["judged_by"] == self._judged_by():
            self._best = best
        else:  # scores of another metric cannot compete: their files take their turn among the newest
            self._saved = list(dict.fromkeys([*(path for _, path in best), *self._saved]))

    @on(CheckpointLoaded, lane=Lane.PERSIST)
    def tell_kept(self, run: Run, event: CheckpointLoaded) -> None:
        """Tell a resumed run what it has already."""
        run.last_checkpoint = event.path
        run.best_checkpoint = self._best[0][1] if self._best else None

    def _judged_by(self) -> list[str]:
        return [] if self.monitor is None else [self.monitor.name, self.monitor.mode]

    def _resume_newest(self, run: Run) -> None:
        found, passed_over = storage.find(self.folder, run.name)
        for line in passed_over:
            run.note(f"passed over: {line}")
            logging.getLogger("heliograph").warning("resume passed over: %s", line)
        if found:
            run.resume(storage.load(found[0].path), found[0].path)
        else:
            run.note(f"begins afresh: no checkpoint of {run.name!r} in {self.folder}")

    def _rank(self, path: Path, value: float | None) -> list[Path]:
        """Enter a checkpoint into the lists; return the files that are no longer kept."""
        known = {*self._saved, *(each for _, each in self._best)}
        self._saved = [each for each in self._saved if each != path] + [path]
        if self.monitor is not None and value is not None:
            # The worst of all is what NaN is; among equals the earlier stays ahead.
            score = value * self.monitor.sign() if value == value else float("inf")
            others = [entry for entry in self._best if entry[1] != path]
            self._best = sorted([*others, (score, path)], key=lambda entry: entry[0])[: self.keep_best]
        self._saved = self._saved if self.keep_last is None else self._saved[-self.keep_last :]
        kept = {*self._saved, *(each for _, each in self._best)}
        return sorted(known - kept)

    def _metadata_of(self, run: Run) -> str:
        if isinstance(self.metadata, str):
            for name in _fields(self.metadata):
                if name not in run.metrics:
                    raise ValueError(
                        f"The checkpoint's name asks for {name!r}, which is no metric.{known_names(name, run.metrics)}"
                    )
            return _Template().vformat(self.metadata, (), run.metrics)
        source = self.metadata or getattr(run.task, "checkpoint_metadata", None)
        text = "" if source is None else source(run)
        if not isinstance(text, str):
            raise TypeError(f"A checkpoint's metadata is a string, the function returned {text!r}.")
        return text


class _Template(Formatter):
    """Fills in metric names, which contain slashes and so are no attribute paths."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return kwargs[field_name], field_name


def _fields(template: str) -> list[str]:
    """Return the metric names in a template; ValueError where it is malformed."""
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]
