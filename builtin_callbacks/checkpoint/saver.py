"""The base of `Checkpoint` and `WeightsCheckpoint`: write at save points, keep the newest and the best."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ...core.checkpoint import storage
from ...core.checkpoint.storage import Entry, JudgedBy
from ...core.distributed.outcomes import on_main
from ...core.engines.options import is_sharding
from ...core.host import ended_for_good, is_preempted
from ...core.metrics.monitor import Monitor
from ...core.objects.program import report_late_listeners
from ...core.system.errors import NotRecorded, add_run_note
from ...events import Lane
from ...events import catalogue as ev
from ...events.checks import check_flag, check_path, check_whole_number
from ...plugins import Plugin, on
from ...plugins.filters import Filter, Recurrence, is_unsaved, moment
from .folder import CheckpointFolder, CheckpointWriter, OnExisting, Retention

if TYPE_CHECKING:
    from ...events import Run
    from ...events.alarms import Alarm


class FolderCopy(Protocol):
    """A copy of the folder in remote storage, as of heliograph-storage; used on the main rank."""

    url: str
    folder: Path  # the local one

    def fetch(self, store: storage.Store, resume: str | Path | None) -> tuple[str | Path | None, list[str]]: ...

    def check(self, store: storage.Store) -> None: ...

    def update(self, run: Run, removed: Collection[Path] = ()) -> None: ...

    def finish(self, run: Run) -> None: ...


@dataclass(slots=True)
class Saved:
    """The saves and measurements of a run.

    Attributes:
        path: the newest checkpoint.
        steps: the optimizer steps of the newest checkpoint.
        is_newest_of_training: whether a measurement of the same weights may rank it.
        requested_at: the step of the newest save.
        value: the latest value of the metric that ranks checkpoints.
        measured_at: the step at which it was measured, -1 before.
        error: the error that failed the run.
    """

    path: Path | None = None
    steps: int | None = None
    is_newest_of_training: bool = False
    requested_at: int | None = None
    value: float | None = None
    measured_at: int = -1
    error: BaseException | None = None

    def judged_at(self, step: int, monitor: Monitor | None) -> JudgedBy | None:
        return None if monitor is None or step != self.measured_at else (monitor.name, monitor.mode, self.value)

    def missing(self, run: Run, plugin: Saver) -> Iterator[str]:
        folder, steps, monitor = plugin.folder, run.progress.steps, plugin.monitor
        history = run.control.history
        takers = dict.fromkeys(request.by for request in history if request.verb in ("veto_save", "withdraw_save"))
        if not run.progress.batches:
            return
        if self.steps is None:
            reason = f"no save was requested in {steps} steps; set every=Every(epochs=1), which also saves the end"
            if takers:
                reason = f"the saves were vetoed or withdrawn, by {', '.join(takers)}"
            yield f"No checkpoint was written to {folder}: {reason}."
            return
        if self.steps < steps and not takers:  # otherwise a plugin decided against the save
            yield (
                f"The newest checkpoint in {folder} is of step {self.steps}, and the run ended at step {steps}: "
                f"{count_steps(steps - self.steps)} not in it. To save the end, use "
                f"{type(plugin).__name__}(..., every=...), or a SaveSchedule without at_end=False."
            )
        if monitor is None or not monitor.can_come(run):
            return
        best = None if plugin.best is None else plugin.best.judged_by
        if best is not None and best[2] is not None and isnan(best[2]):
            yield f"No checkpoint is the best: {monitor.name!r} was NaN at all of them."
        if run.checkpoints.best is None and monitor.split == "late":
            yield (
                f"No checkpoint is the best by {monitor.name!r}: no late result with it arrived while its checkpoint "
                f"was kept. Keep more with keep_last=, or save less often."
            )
        elif run.checkpoints.best is None:
            measured = "never measured" if self.measured_at < 0 else f"measured last at step {self.measured_at}"
            yield (
                f"No checkpoint is the best by {monitor.name!r}, because none was saved at the step of a measurement: "
                f"it was {measured}. Measure and save at common steps, for example with Every(steps=200) for both."
            )


class Saver(Plugin):
    """Base of the plugins that write checkpoints; see `Checkpoint` for the arguments.

    Attributes:
        folder: where checkpoints are written.
        file_name: the prefix of the names of the run's files; empty until it is known.
        monitor: the metric that ranks the best, if any.
        holds_saves: write nothing while this is True; the plugin that sets it resets it.
        expects_best: whether a run without validation data gets a warning or a note that it has no best checkpoint.
    """

    affects_training = False
    weights_only: ClassVar[bool] = False

    def __init__(
        self,
        folder: str | Path,
        *,
        every: Filter | None = None,
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        background: bool = False,
    ) -> None:
        check_path(f"{type(self).__name__}(folder)", folder, "a folder")
        if keep_last is not None:
            keep_last = check_whole_number("keep_last", keep_last, at_least=1, or_else="None for all")
        keep_best = check_whole_number("keep_best", keep_best, at_least=0)
        check_flag("background", background)
        if not isinstance(every, Filter | None):
            raise TypeError(f"{type(self).__name__}(every=...) takes a filter such as Every(epochs=1), got {every!r}.")
        if bool(keep_best) != (monitor is not None) or (mode is not None and monitor is None):
            raise ValueError(
                f"keep_best={keep_best}, monitor={monitor!r}, mode={mode!r} do not fit together: set both keep_best "
                f"and monitor, for example keep_best=1, monitor='validation/loss', or neither."
            )
        self.monitor = None if monitor is None else Monitor(monitor, mode, late=True)
        self._remote: FolderCopy | None = None
        if re.match(r"[\w+.:-]{2,}:/", str(folder)):  # also a Path of a URL, which is refused
            from ...plugins.discovery import find  # imported for a remote copy

            kept = {"keep_last": keep_last, "keep_best": keep_best, "monitor": self.monitor}
            self._remote = find("fsspec", "heliograph.storage").load()(str(folder), **kept)
            folder = self._remote.folder
        self.folder, self.holds_saves, self.expects_best = Path(folder), False, True
        self.every = deepcopy(every)
        self._recurrence = None if self.every is None else Recurrence(self.every)
        ignores = (ev.Log, ev.ValidationEnd, ev.LateResult) if self.monitor is None else self.monitor.ignores
        self.ignores = ignores + (() if self.every is not None else (ev.BatchEnd, ev.EpochEnd))
        self.asks = ("save",) * (self.every is not None)
        self.needs = ("save",) * (self.every is None)
        self.exclusive = (f"the checkpoints in {self.folder.absolute()}",)
        self._retention = Retention(keep_last, keep_best, self.monitor)  # used on the main rank only, like the files
        self._files = CheckpointFolder(self._retention)
        self._on_existing: OnExisting = "new_name"
        self.background = background
        self._writer = CheckpointWriter(weights_only=self.weights_only)
        if background:
            from .background_writer import BackgroundWriter  # imported when one is used

            self._writer = BackgroundWriter(weights_only=self.weights_only)
        self._forget()

    def _forget(self) -> None:
        self.file_name, self._saved, self._is_open = "", Saved(), False
        self._training: str | None = None  # that was saved or resumed

    def describe(self, run: Run) -> str:
        """Return where checkpoints are written, and which are kept."""
        rule = "all" if self._retention.keep_last is None else f"the last {self._retention.keep_last}"
        if self.monitor is not None and self.monitor.can_come(run):
            way = "largest" if self.monitor.mode == "max" else "smallest"
            rule += f" and the best {self._retention.keep_best} by the {way} {self.monitor.name}"
        content = "weights" if self.weights_only else "checkpoints"
        when = "" if self.every is None else f" {self.every} and at the end"
        copies = "" if self._remote is None else f", copies them to {self._remote.url}"
        return f"writes {content} to {self.folder}{when}, keeps {rule}{copies}"

    def rehearse(self, folder: Path) -> list[Path]:
        """Write to another folder."""
        before, self.folder, self._remote = self.folder, folder, None
        return [before]

    def forecast(self, totals: Mapping[str, float]) -> Mapping[str, int]:
        """Return how many checkpoints would be kept, unless all are, and how often this plugin requests one."""
        last, best = self._retention.keep_last, self._retention.keep_best
        counts = {} if last is None else {"kept": last + best}
        if self.every is None or (times := self.every.times(totals)) is None:
            return counts
        return counts | {"save": times + (not self.every.is_due_at_end(totals))}

    @on(ev.TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        if run.report.is_replay:
            raise NotRecorded("the state of the run, such as its weights")
        self.close()  # a second interrupt may have left a write of the previous run
        self._forget()
        self._files.begin()
        if self._recurrence is not None:
            self._recurrence.begin(run)
        if self.monitor is not None and self.monitor.can_come(run):
            self.monitor.check_measured(run)
        elif self.monitor is not None:
            say = run.warn if self.expects_best else run.note
            say(f"No checkpoint is the best by {self.monitor.name!r}: fit has no validation data.")
        self._is_open = True
        self._start(run)
        if self._remote is not None and run.engine.is_main:
            self._remote.update(run)
        self._writer.begin(run)

    def _start(self, run: Run) -> None:
        raise NotImplementedError

    def _claim(self, run: Run, wanted: str, training_id: str, *, is_branch: bool = False) -> list[str]:
        plugins = (plugin for plugin in run.plugins if run.plugins.is_enabled(plugin))
        resumes = (getattr(plugin, "resume", None) for plugin in plugins)
        is_from_path = any(getattr(resume, "path", None) not in (None, "auto") for resume in resumes)
        on_existing = self._on_existing
        if is_branch or (on_existing == "replace" and is_from_path):  # a branch leaves the original training in place
            on_existing = "new_name"
        return self._files.claim(training_id, wanted, on_existing)

    @on(ev.CheckpointLoaded, lane=Lane.PERSIST)
    def find_existing(self, run: Run, event: ev.CheckpointLoaded) -> None:
        if not self.weights_only:  # also if the run ends before its first save
            report_late_listeners(run, self.name)
        if self._recurrence is not None:
            self._recurrence.resume(run, moment)

        def look() -> tuple[Entry | None, bool, Path | None, str, list[str]]:
            self._files.open(run, self.folder)
            is_claimed = self._files.is_claimed_by(run.checkpoints.training_id)  # not if another plugin resumed
            notes = [] if is_claimed else self._claim(run, run.name, run.checkpoints.training_id)
            newest, path = self._files.find_existing(), event.path
            is_newest = newest is not None and path is not None and path.resolve() == newest.path.resolve()
            return newest, is_newest, self._files.best, self._files.name, notes

        newest, is_newest, best, self.file_name, notes = on_main(run.engine, look)
        self._training = run.checkpoints.training_id
        for note in notes:
            run.note(note)
        self._announce_best(run, best)
        self._continue(run, event.path, newest, is_newest=is_newest)

    def _continue(self, run: Run, path: Path | None, newest: Entry | None, *, is_newest: bool) -> None:
        raise NotImplementedError

    @on(ev.BatchEnd, ev.EpochEnd, idle_until="next_due")
    def ask_when_due(self, run: Run, event: ev.BatchEnd | ev.EpochEnd) -> None:
        if self.every is not None and self.every(run):
            run.control.request_save(str(self.every))

    def next_due(self, run: Run) -> Alarm | None:
        idle_until = None if self.every is None else self.every.idle_until
        return None if idle_until is None else idle_until(run)

    @on(ev.LastBoundary)
    def ask_at_end(self, run: Run, event: ev.LastBoundary) -> None:
        if self._recurrence is not None and run.progress.batches and is_unsaved(run, self._recurrence):
            run.control.request_save("at the end")
            self._recurrence.last = moment(run.progress)  # the state is captured before the save

    @on(ev.ValidationEnd, ev.Log, optional=True)
    def read(self, run: Run, event: ev.ValidationEnd | ev.Log) -> None:
        """Read the metric that ranks the checkpoints; it applies to the weights of this step only.

        It ranks the newest checkpoint, too, if that was saved before at the same step.
        """
        if self.monitor is None or self.holds_saves or not self.monitor.is_for(run, event):
            return
        step, saved = run.progress.steps, self._saved
        if step in (saved.requested_at, saved.steps):
            self._writer.drain()  # the next measurement may be of other weights
        saved.value, saved.measured_at = float(self.monitor.read(event.metrics)), step
        if saved.is_newest_of_training and saved.steps == step and saved.path is not None:
            self._tidy(run, saved.judged_at(step, self.monitor), is_new=False)

    @on(ev.LateResult, optional=True)
    def rank_late(self, run: Run, event: ev.LateResult) -> None:
        """Rank the evaluated checkpoint, if it still exists."""
        monitor, last = self.monitor, self._saved.path
        if monitor is not None and last is not None and not self.holds_saves and monitor.is_for(run, event):
            self._writer.drain()
            judged_by = (monitor.name, monitor.mode, float(monitor.read(event.metrics)))
            self._tidy(run, judged_by, is_new=False, judged=self.folder / event.path.name)

    @on(ev.SavePoint, lane=Lane.PERSIST, optional=True)
    def save(self, run: Run, event: ev.SavePoint) -> None:
        """Write a checkpoint; when it is durable, emit `CheckpointSaved` and remove the oldest."""
        if self._recurrence is not None:
            self._recurrence.last = moment(run.progress)
        if self.holds_saves:
            return
        step = run.progress.steps
        self._is_open, self._saved.requested_at, self._training = True, step, run.checkpoints.training_id
        if not self.weights_only:
            report_late_listeners(run, self.name)
        name = on_main(run.engine, partial(self._next_name, run))
        judged_by = self._saved.judged_at(step, self.monitor)
        write = partial(self._files.write, name, judged_by, read_back=self.background)
        report = partial(self._report_save, run, step, judged_by)
        if not self.weights_only and is_sharding(run.engine) and run.engine.state == "sharded":
            from .background_writer import save_shards  # imported when shards are saved

            begin = self._files.begin_shards
            save_shards(run, run.engine, self._writer, begin, write, report, in_background=self.background)
        else:
            self._writer.do(run, partial(write, self._writer.hold(run), None), report)

    def _next_name(self, run: Run) -> str:
        self._files.open(run, self.folder)
        if not self._files.name:  # the plugin was off at the start of the run
            for note in self._claim(run, run.name, run.checkpoints.training_id):
                run.note(note)
        return self._files.next_name(run)

    def _report_save(self, run: Run, step: int, judged_by: JudgedBy | None, paths: tuple[Path, Path | None]) -> None:
        (path, best), saved = paths, self._saved
        # otherwise `last` is a checkpoint that can be resumed
        if not self.weights_only or run.checkpoints.last in (None, saved.path):
            run.checkpoints.last = path
        saved.path, saved.steps, saved.is_newest_of_training = path, step, True
        self._announce_best(run, best)
        run.emit(ev.CheckpointSaved(path, is_best=best == path))
        measured = saved.judged_at(step, self.monitor)  # also while it was written
        self._tidy(run, None if measured == judged_by else measured, is_new=True)

    def _tidy(self, run: Run, judged_by: JudgedBy | None, *, is_new: bool, judged: Path | None = None) -> None:
        assert self._saved.path is not None

        def report(done: tuple[Path | None, list[tuple[Path, str]]]) -> None:
            best, removed = done
            self._announce_best(run, best)
            for path, reason in removed:
                run.emit(ev.CheckpointPruned(path, reason))
            if self._remote is not None and run.engine.is_main:
                self._remote.update(run, [path for path, _ in removed])

        tidy = partial(self._files.tidy, self._saved.path, judged_by, is_new=is_new, judged=judged)
        self._writer.do(run, tidy, report, is_save=False)

    def _announce_best(self, run: Run, best: Path | None) -> None:
        if self.monitor is not None:  # otherwise another plugin ranks them
            run.checkpoints.best = best

    @on(ev.LastBoundary, ev.TrainEnd, lane=Lane.PERSIST)
    def finish_writing(self, run: Run, event: ev.LastBoundary | ev.TrainEnd) -> None:
        self.drain()

    @on(ev.RunFailed, lane=Lane.PERSIST)
    def keep_error(self, run: Run, event: ev.RunFailed) -> None:
        self._saved.error = event.error

    @on(ev.RunClosed, lane=Lane.PERSIST)
    def end(self, run: Run, event: ev.RunClosed) -> None:
        if not self._is_open:
            return
        error, self._saved.error = self._saved.error, None
        try:
            self._writer.end(run)
        finally:
            # otherwise another plugin reports it
            is_last = not self.weights_only or run.checkpoints.last == self._saved.path
            is_early = error is not None or is_preempted(run)
            if is_last and is_early and run.engine.is_main and not self.holds_saves and (lost := self._lost(run)):
                run.note(lost)
                if error is not None:
                    add_run_note(error, lost)
        if self._remote is not None and run.engine.is_main:
            self._remote.finish(run)
        if ended_for_good(run, event.status) and not self.holds_saves:
            for text in self._saved.missing(run, self):
                run.warn(text)

    def _lost(self, run: Run) -> str | None:
        raise NotImplementedError

    @property
    def best(self) -> Entry | None:
        """The best checkpoint when it was ranked; only on the main rank."""
        return self._retention.best

    def drain(self) -> None:
        """Wait until everything is written; on several ranks a collective."""
        self._writer.drain()

    def pin(self, path: str | Path | None = None) -> Path:
        """Exempt a checkpoint from retention; remove the file `<name>.pinned` to undo this.

        Args:
            path: the checkpoint; by default the last one that was written.

        Returns:
            The path of the checkpoint.

        Raises:
            ValueError: nothing was written yet, or the file is not a checkpoint.
            FileNotFoundError: there is no such file.
        """
        if not (path := path or self._saved.path):
            raise ValueError("No checkpoint is written yet: pin one later, or give its path.")
        entry = storage.read_manifest(Path(path))
        storage.Store(entry.path.parent, entry.run_name).pin(entry.path)
        return entry.path

    def where_saved(self) -> tuple[Path, str | None]:
        """Return the folder, and the id of the training that this object has saved there, if any.

        `trainer.test(task, data, weights="best")` looks there.
        """
        return self.folder, self._training

    def state_dict(self) -> dict[str, Any]:
        due = {} if self._recurrence is None else {"every": self._recurrence.state_dict()}
        return {"value": self._saved.value, "measured_at": self._saved.measured_at, **due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._saved.value, self._saved.measured_at = state["value"], state["measured_at"]
        if self._recurrence is not None:
            self._recurrence.load_state_dict(state.get("every", {}))

    def close(self) -> None:
        """Finish the writing, and release the folder unless a write is still running."""
        try:
            self._writer.close()
        finally:
            self._is_open = False
            if self._writer.is_idle:
                self._files.close()


def count_steps(number: int) -> str:
    return "1 step is" if number == 1 else f"{number} steps are"
