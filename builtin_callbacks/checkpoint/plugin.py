"""Save the run, keep the newest and the best, and resume."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...core.checkpoint import storage
from ...core.checkpoint.state.compatibility import CHANGES, BatchChange
from ...core.checkpoint.unseen.program import doubt_late_listeners
from ...core.distributed.ranks.failure import on_main
from ...core.engines.sharded.states import ShardingEngine
from ...core.engines.weights import LEFT_WEIGHTS
from ...core.host import ended_for_good, is_preempted
from ...core.metrics.monitor import Monitor
from ...core.system.errors import NotRecorded
from ...core.system.extras import kind_of
from ...events import (
    BatchEnd,
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochEnd,
    Lane,
    LastBoundary,
    Log,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    TrainEnd,
    TrainStart,
    ValidationEnd,
)
from ...events.checks import check_flag, check_whole_number
from ...plugins import Plugin, on
from ...plugins.filters import Filter
from .names import ON_EXISTING, FileNames, Metadata, OnExisting, claim_name
from .resume import Extent, ResumePoint, check_best, find, load_best, read, share_state
from .retention import Retention
from .saves import Saved, SaveRequests
from .verify_resume import VerifyResume
from .weights_only import Capture, check_options, full_ones, warn_at_start
from .writers import BackgroundWriter, LoopWriter, Shards, Writer, begin_shards, merge_shards, room_for

if TYPE_CHECKING:
    from ...events.alarms import Alarm


class Checkpoint(Plugin):
    """Save the state of a run in files, and resume from them.

    Every save point writes `<run_name>_epoch_<epoch>_iter_<step>[_<metadata>].pth`: epochs and steps that are finished.

    A save is written aside in the same folder, synced and renamed; only then are older ones removed.
    The newest is never removed, nor are the best, what is pinned, and what is of another training. A save that fails
    raises and leaves the former ones as they were. While the run lasts, no other process may write checkpoints of its
    name to the folder.

    Args:
        folder: where to write; made where it is missing.
        every: when to save, such as `Every(epochs=1)`, `Every(seconds=600)` or `At(fraction=[0.5, 0.9])`; and at the
            end of the training. None leaves it to others to ask for saves, such as `SaveSchedule`; both together save
            once at a boundary.
        metadata: the end of the name: a template of metric names such as `"accuracy_{validation/accuracy:.4f}"`, or a
            function of the run; by default what the task's `checkpoint_metadata(run)` returns, if it has one. On
            several ranks the main one is asked. A part whose metric was not measured yet is left out, with a note.
        keep_last: how many of the newest to keep, pinned ones not counted; None keeps all.
        keep_best: how many of the best by `monitor` to keep besides. Only a save at the very step at which the metric
            was measured competes: a value is never taken for other weights.
        monitor: the metric that `keep_best` goes by, such as `validation/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better; may be left out for a loss or an error.
        monitor_required: whether a run without validation data is an error, where `monitor` is a metric of a
            validation; False notes it, and keeps only the newest.
        resume: None starts fresh; `auto` resumes the newest intact checkpoint of this run's name, if there is one,
            and notes what it skipped; a path resumes that file, as a branch if the folder has a newer checkpoint of
            its training.
        on_existing: what to do where the folder holds another training under the run's name: write under a `new_name`
            (`run-2`, and the result says so), `refuse` to begin, or `replace` it: its checkpoints go when the first of
            this run is written, but for pinned ones.
        background: the loop only copies the state, and continues while it is written. One save at a time: the next one
            waits, and the result notes for how long. `CheckpointSaved` is emitted when the file is durable, at the end
            of a later batch, and `CheckpointPruned` when older ones are gone; an error of the writing is raised there,
            too. Takes as much memory again as the state.
        load_best: at the end of a run that completed or was stopped, load the best checkpoint back: only the `weights`,
            or `everything`, the optimizers and the schedulers too.
        batch_change: what to do where a resumed run has another global batch (ranks x batch size x accumulation):
            `refuse` it, but if it is one process that resumes one, the result notes it; `keep` the learning rates
            as they were saved; scale them in proportion (`linear`) or with the square root (`sqrt`) of the ratio. The
            resume is not exact then. Where the batch size is unknown, nothing is refused or scaled.
        sharded: let every rank write what it holds, into a folder beside the file, instead of gathering all on the main
            rank; for an engine that holds shards, `FSDPEngine`. By default as that engine says.
        weights_only: save only the weights (with an average of them, the counters and the metrics), to use and not to
            resume them: small files, which `load_weights`, `trainer.test(weights=...)` and `checkpoint export` read.
            Retention, names and `load_best="weights"` are the same. For a training that can be resumed, register
            another `Checkpoint` in another folder, `Checkpoint("runs/x/weights", weights_only=True).named("weights")`.
        trained_only: leave out parameters that require no gradient and have not changed since the run began, such as
            the base model of LoRA. The program that resumes the file, or loads its weights, must have the same ones,
            which is verified by their digests. Not for an engine that divides weights, such as `FSDPEngine`.
        restore_attributes: at a resume, give plain attributes of the task and its modules that no `state_dict` holds,
            such as a counter or an annealed dropout, the values that the training gave them. What was restored is in
            `result.resume.restored`; anything else that differs is a reason in `result.resume.reasons`.

    On several ranks the main rank (0) holds the folder and writes, one file for all; every rank is informed at the same
    step, and a save that fails raises on all of them. A file that not every rank can see is sent by the main rank.

    Raises:
        ValueError: an argument is out of its range; at the run's start, the folder cannot be written, another process
            writes this run's checkpoints there, or the path to resume from is damaged; when metrics are measured, one
            of `metadata` or `monitor` does not exist; at the end, the best checkpoint is damaged.
        FileNotFoundError: at the run's start, the path to resume from does not exist.
        OSError: a save failed.
    """

    affects_training = False

    def __init__(
        self,
        folder: str | Path,
        *,
        every: Filter | None = None,
        metadata: Metadata | None = None,
        keep_last: int | None = 1,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        monitor_required: bool = True,
        resume: str | Path | None = None,
        background: bool = False,
        load_best: Extent | None = None,
        batch_change: BatchChange = "refuse",
        sharded: bool | None = None,
        restore_attributes: bool = True,
        on_existing: OnExisting = "new_name",
        weights_only: bool = False,
        trained_only: bool = False,
    ) -> None:
        if keep_last is not None:
            keep_last = check_whole_number("keep_last", keep_last, at_least=1, or_else="None for all")
        keep_best = check_whole_number("keep_best", keep_best, at_least=0)
        flags = {"background": background, "restore_attributes": restore_attributes, "weights_only": weights_only}
        flags["monitor_required"] = monitor_required
        flags["trained_only"] = trained_only
        for name, flag in flags.items() if sharded is None else {**flags, "sharded": sharded}.items():
            check_flag(name, flag, or_else="None" if name == "sharded" else "")
        check_best(keep_best, monitor, mode, load_best, required=monitor_required)
        if batch_change not in CHANGES:
            raise ValueError(f"batch_change is one of {', '.join(CHANGES)}; got {batch_change!r}.")
        if on_existing not in ON_EXISTING:
            raise ValueError(f"on_existing is one of {', '.join(ON_EXISTING)}; got {on_existing!r}.")
        _check_paths(folder, resume)
        of_a_resume = {
            "resume": resume,
            "batch_change": batch_change,
            "restore_attributes": restore_attributes,
        }
        check_options(load_best, sharded, of_a_resume, weights_only=weights_only)
        self._file_names = FileNames(metadata)
        self.folder, self.metadata, self.resume, self.load_best = Path(folder), metadata, resume, load_best
        self._untried: list[str] = []  # in a rehearsal, what is resumed outside of it
        self.batch_change, self.sharded, self.background = batch_change, sharded, background
        self.restore_attributes, self.weights_only = restore_attributes, weights_only
        self.on_existing: OnExisting = on_existing
        self.trained_only = trained_only
        self.monitor = None if monitor is None else Monitor(monitor, mode)
        self.monitor_required = monitor_required
        ignores = (Log, ValidationEnd) if self.monitor is None else self.monitor.ignores
        self._requests = SaveRequests(every)
        self.every = self._requests.every
        ignores += () if self.every is not None else (BatchEnd, EpochEnd)
        self.ignores = tuple(event for event in ignores if event not in self._file_names.events)
        self.asks = ("save",) * (self.every is not None)
        self.brings = () if weights_only else (VerifyResume,)
        self.needs = () if self.every is not None else ("save",)
        self.exclusive = (f"the checkpoints in {self.folder.absolute()}", *((LEFT_WEIGHTS,) if load_best else ()))
        self._kept = Retention(keep_last, keep_best, self.monitor)  # used on the main rank only, as is the store
        kind = BackgroundWriter if background else LoopWriter
        self._capture = Capture(weights_only=weights_only, trained_only=trained_only)
        self._writer: Writer = kind(self._capture)
        self._store: storage.Store | None = None
        self._found, self._replaces = ResumePoint(), list[storage.Entry]()
        self._own = list[storage.Entry]()  # of the training, as they were when the run began
        self.holds_saves = False  # writes nothing; a fork sets it until it is changed
        self.file_name = ""  # what the names of its files begin with, when that is known
        self._training: str | None = None  # which it has saved, or resumed
        self._is_open = False
        self._last: Path | None = None
        self._value: float | None = None
        self._value_at = -1
        self._saved = Saved()

    def describe(self, run: Run) -> str:
        """Say where checkpoints are written, and which are kept."""
        way = "the largest" if self.monitor is not None and self.monitor.mode == "max" else "the smallest"
        kept = "all" if self._kept.keep_last is None else f"the last {self._kept.keep_last}"
        best = ""
        if self.monitor is not None and self.monitor.can_come(run):
            best = f" and the best {self._kept.keep_best} by {way} {self.monitor.name}"
        back = f", loads the best {self.load_best} back at the end" if self.load_best else ""
        what = ("weights" if self.weights_only else "checkpoints") + " of what is trained" * self.trained_only
        when = "" if self.every is None else f" {self.every} and at the end"
        return f"writes {what} to {self.folder}{when}, keeps {kept}{best}{back}"

    def rehearse(self, folder: Path) -> list[Path]:
        """Write elsewhere, and resume only what was written there; a checkpoint that cannot be read is an error."""
        former, self.folder = self.folder, folder
        if self.resume is not None:
            if self.resume != "auto":
                read(Path(self.resume))
            if self.resume != "auto" or any(former.glob("*.pth")):
                self._untried = [f"what resume={str(self.resume)!r} finds for {former} is not loaded in a rehearsal"]
        self.resume = None if self.weights_only else "auto"
        return [former]

    def forecast(self, totals: Mapping[str, float]) -> Mapping[str, int]:
        """Return how many checkpoints would be kept, unless all are, and how often this plugin asks for one."""
        kept = {} if self._kept.keep_last is None else {"kept": self._kept.keep_last + self._kept.keep_best}
        if self.every is None or (times := self.every.times(totals)) is None:
            return kept
        return kept | {"save": times + (not self.every.is_due_at_end(totals))}

    @on(TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Take the folder, forget the former run, and find what to resume from."""
        if run.is_replay:
            raise NotRecorded("the state of the run, such as its weights")
        self.close()  # a second interrupt may have left the former run's writing as it was
        self._last, self._value, self._value_at, self._saved, self._training = None, None, -1, Saved(), None
        self._file_names.begin()
        self._requests.begin(run)
        if self.monitor is not None and not self.monitor_required and not self.monitor.can_come(run):
            run.note("no checkpoint is kept as the best, as fit was given no validation data: only the newest are")
        elif self.monitor is not None:
            self.monitor.check_measured(run)
        others = full_ones(run, Checkpoint) if self.weights_only else []
        if self.weights_only:
            warn_at_start(run, self.name, is_alone=not others)
        waits = any(each.resume is not None for each in others)  # for that one to say which training it is
        if self.sharded and not isinstance(run.engine, ShardingEngine):
            raise ValueError(
                f"sharded=True is for an engine that holds shards, as FSDPEngine does; {kind_of(run.engine)} "
                f"holds everything on every rank: leave it out."
            )

        def look() -> tuple[str, str, Path | None, list[str], str]:
            store = self._open_store(run)
            with store.steady() if run.checkpoint_source is None else nullcontext():  # a source puts files there
                found = self._found = find(store, self.resume, run.checkpoint_source)
                training_id, name, notes = found.choose_training(run.name, run.training_id)
                if found.path is not None or not (run.is_resuming or waits):  # else another plugin says what it resumes
                    notes += self._claim_name(run, store, training_id, name)
                    self._own = [] if found.path is None else store.own()
            return training_id, self.file_name, found.path, notes, found.warning

        self._found, self._replaces, self.file_name, self._is_open, self._own = ResumePoint(), [], "", True, []
        training_id, self.file_name, path, notes, warning = on_main(run.engine, look)
        run.training_id = training_id
        self._kept.begin(())
        self._capture.begin(run)
        self._writer.begin(run)
        for note in [*notes, *self._untried]:
            run.note(note)
        if warning:
            run.warn(warning)
        if path is not None:
            state = share_state(run.engine, path, self._found.state)
            self._found.state = None
            how = {"batch_change": self.batch_change, "restore_attributes": self.restore_attributes}
            run.resume({**state, "training_id": training_id, **how}, path)

    @on(CheckpointLoaded, lane=Lane.PERSIST)
    def note_kept(self, run: Run, event: CheckpointLoaded) -> None:
        """Find what of this training is on disk, and note it."""
        self._requests.resume(run)

        def look() -> tuple[storage.Entry | None, Path | None, bool, str, list[str]]:
            store, training_id = self._open_store(run), run.training_id
            is_claimed = self.file_name and store.training_id == training_id
            notes = [] if is_claimed else self._claim_name(run, store, training_id, run.name)
            own, self._own = (self._own if is_claimed else []) or store.own(), []  # another plugin may resume another
            self._kept.begin(own, self._found.damaged)
            is_newest = bool(own) and event.path is not None and event.path.resolve() == own[0].path.resolve()
            return next(iter(own), None), self._best(), is_newest, self.file_name, notes

        newest, best, is_newest, self.file_name, notes = on_main(run.engine, look)
        self._training = run.training_id
        for note in notes:
            run.note(note)
        self._announce_best(run, best)
        if self.weights_only:
            if newest is not None:
                self._last = newest.path
                self._saved.hold(int(newest.progress["steps"]), is_own=False)
        elif event.path is not None:
            self._last = run.last_checkpoint = event.path
            self._saved.hold(run.progress.steps, is_own=is_newest)
            if is_newest:  # a kill may have come between the last save and its tidying, and nothing may be left to save
                self._tidy(run, event.path, None, [])

    @on(BatchEnd, EpochEnd, idle_until="next_due")
    def ask_when_due(self, run: Run, event: BatchEnd | EpochEnd) -> None:
        """Ask for a save, with `every`."""
        self._requests.ask_when_due(run)

    def next_due(self, run: Run) -> Alarm | None:
        """Return the count at which `every` is due; None where it has to be asked at each."""
        idle_until = None if self.every is None else self.every.idle_until
        return None if idle_until is None else idle_until(run)

    @on(LastBoundary)
    def ask_at_end(self, run: Run, event: LastBoundary) -> None:
        """Ask for the last one, with `every`."""
        self._requests.finish(run)

    @on(ValidationEnd, Log, optional=True)
    def read(self, run: Run, event: ValidationEnd | Log) -> None:
        """Read the metric that the best are chosen by; it is valid for the weights of this step only.

        The newest checkpoint is judged by it, too, where it was saved before at the same step.
        """
        if self.monitor is None or not self.monitor.is_for(run, event):
            return
        if self._saved.is_loaded_back:
            return
        step, saved = run.progress.steps, self._saved
        if step in (saved.asked_at, saved.steps):
            self._writer.drain()  # that save and its tidying: the next measurement may be of other weights
        self._value, self._value_at = float(self.monitor.read(event.metrics)), step
        if saved.is_own and saved.steps == step and self._last is not None:
            self._tidy(run, self._last, self._judge(), [])

    @on(ValidationEnd, Log, lane=Lane.REPORT, optional=True)
    def check_names(self, run: Run, event: ValidationEnd | Log) -> None:
        """Refuse a metric in the names of the files that does not exist, now that those of others are there."""
        if run.engine.is_main:
            self._file_names.check(run, event)

    @on(SavePoint, lane=Lane.PERSIST, optional=True)
    def save(self, run: Run, event: SavePoint) -> None:
        """Write; then, or when it is written, emit that and remove what is no longer kept."""

        def prepare() -> str:
            store = self._open_store(run)
            if not self.file_name:  # the plugin was switched off when the run began
                for note in self._claim_name(run, store, run.training_id, run.name):
                    run.note(note)
            return self._file_names.name(run, self.file_name)

        if self.holds_saves:
            self._requests.note(run)
            return
        if self._saved.is_loaded_back:
            if self._saved.steps != run.progress.steps:
                run.warn(self._saved.late(run))
            return
        self._is_open, self._saved.asked_at, self._training = True, run.progress.steps, run.training_id
        self._requests.note(run)
        if not self.weights_only:
            doubt_late_listeners(run, self.name)
        name = on_main(run.engine, prepare)
        judged_by = self._judge() if self._value_at == run.progress.steps else None
        if isinstance(run.engine, ShardingEngine) and self._is_sharded(run.engine):
            self._save_shards(run, run.engine, name, judged_by)
        else:
            state = self._writer.hold(run)
            write = partial(self._write, name, state, judged_by)
            self._writer.do(run, write, partial(self._report_save, run, run.progress.steps, judged_by))

    @on(LastBoundary, lane=Lane.PERSIST)
    def finish_writing(self, run: Run, event: LastBoundary) -> None:
        """Let an error of the writing fail the run, and report what is written before the last saves are asked for."""
        self._writer.drain()

    @on(TrainEnd, lane=Lane.TRANSFORM)
    def load_back(self, run: Run, event: TrainEnd) -> None:
        """Load the best back, before other handlers use the weights, such as one that exports them."""
        if self.load_best and self.monitor:
            self._writer.drain()
            if note := load_best(run, self._kept.best, self.monitor, self.load_best):
                self._saved.is_loaded_back = True
                run.note(note)

    @on(TrainEnd, lane=Lane.PERSIST)
    def wait(self, run: Run, event: TrainEnd) -> None:
        """Let an error of the writing fail the run."""
        self._writer.drain()

    @on(RunFailed, lane=Lane.PERSIST)
    def keep_error(self, run: Run, event: RunFailed) -> None:
        """Keep the error, to add to it what is lost."""
        self._saved.error = event.error

    @on(RunClosed, lane=Lane.PERSIST)
    def end(self, run: Run, event: RunClosed) -> None:
        """Finish the writing however the run ended; say what is not saved, and how to resume what is."""
        if not self._is_open:
            return
        error, self._saved.error = self._saved.error, None
        try:
            self._writer.end(run)
        finally:
            is_last = not self.weights_only or run.last_checkpoint == self._last  # else another one says it
            if run.engine.is_main and is_last and not self.holds_saves and (error is not None or is_preempted(run)):
                how = {"weights_only": self.weights_only, "resumes": self.resume == "auto"}
                self._saved.report(run, error, self.folder, self._last, **how)
        self._file_names.finish(run)
        if ended_for_good(run, event.status) and not self.holds_saves:
            best = None if self._kept.best is None else self._kept.best.judged_by
            monitor = self.monitor if self.monitor is not None and self.monitor.can_come(run) else None
            asked = monitor, self.load_best, self._value_at, best
            for text in self._saved.missing(run, self.folder, *asked, asks=self.every is not None):
                run.warn(text)

    def pin(self, path: str | Path | None = None) -> Path:
        """Keep a checkpoint for good; remove the file `<name>.pinned` beside it to let it go.

        Args:
            path: the checkpoint; by default the last one that was written.

        Returns:
            Where it lies.

        Raises:
            ValueError: nothing was written yet, or the file is not a checkpoint.
            FileNotFoundError: there is no such file.
        """
        if path is None and self._last is None:
            raise ValueError("No checkpoint is written yet: pin one later, or give its path.")
        entry = storage.read_manifest(Path(path or self._last or ""))
        storage.Store(entry.path.parent, entry.run_name).pin(entry.path)
        return entry.path

    def where_saved(self) -> tuple[Path, str | None]:
        """Return the folder, and the id of the training that this object has saved there, if it has.

        That is where `trainer.test(task, data, weights="best")` looks.
        """
        return self.folder, self._training

    def state_dict(self) -> dict[str, Any]:
        """Return the value by which the run's present state competes."""
        return {"value": self._value, "measured_at": self._value_at, **self._requests.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; which checkpoints there are is read from the folder."""
        self._value, self._value_at = state["value"], state["measured_at"]
        self._requests.load_state_dict(state)

    def close(self) -> None:
        """Finish the writing, and let others write to the folder; not while something is still being written."""
        try:
            self._writer.close()
        finally:
            self._is_open = False
            if self._store is not None and self._writer.is_idle:
                self._store.close()
                self._store = None

    def _open_store(self, run: Run) -> storage.Store:
        """Return the run's store; it is closed while the plugin is switched off."""
        if self._store is None:
            store, source = storage.Store(self.folder, run.name), run.checkpoint_source
            for line in store.open(patience=0.0 if source is None else source.patience):
                run.note(line)
            self._store = store
            if self.file_name:
                store.write_as(run.training_id, self.file_name)
        return self._store

    def _claim_name(self, run: Run, store: storage.Store, training_id: str, wanted: str) -> list[str]:
        """Find the name that the training writes under; return what there is to say."""
        is_branch = any(each._found.newer for each in full_ones(run, Checkpoint))  # what it branched from stays
        notes, self._replaces = claim_name(store, training_id, wanted, "new_name" if is_branch else self.on_existing)
        self.file_name = store.name
        return notes

    def _is_sharded(self, engine: ShardingEngine) -> bool:
        if self.weights_only:
            return False
        return engine.state == "sharded" if self.sharded is None else self.sharded

    def _save_shards(self, run: Run, engine: ShardingEngine, name: str, judged_by: storage.JudgedBy | None) -> None:
        """Let every rank write its shards, then the main rank the rest; it is a checkpoint only then."""
        tensors, rest = engine.shard_state(run.modules, run.optimizers)
        state = self._writer.hold(run, rest)
        step = run.progress.steps
        needed = sum(run.engine.gather_objects(room_for(tensors, is_main=run.engine.is_main)))
        folder = on_main(run.engine, lambda: self._open_store(run).begin_shards(needed))
        write = begin_shards(engine, tensors, folder, run.engine.rank, in_background=self.background)

        def commit(of_ranks: list[Shards]) -> None:
            shards = merge_shards(of_ranks)
            write = partial(self._write, name, state, judged_by, shards)
            self._writer.do(run, write, partial(self._report_save, run, step, judged_by))

        self._writer.do_on_each(run, write, commit)

    def _announce_best(self, run: Run, best: Path | None) -> None:
        if self.monitor is not None:  # else it is another one that knows
            run.best_checkpoint = best

    def _best(self) -> Path | None:
        return None if self._kept.best is None else self._kept.best.path

    def _write(
        self,
        name: str,
        state: storage.State,
        judged_by: storage.JudgedBy | None,
        shards: Shards | None = None,
    ) -> tuple[Path, Path | None]:
        """Make a checkpoint durable; return where it lies, and which is the best now."""
        assert self._store is not None
        hinges = bool(self._found.damaged or self._replaces)  # what is good by itself goes for this one
        read_back = self.background or hinges
        entry = self._store.save(name, state, judged_by=judged_by, shards=shards, read_back=read_back)
        self._kept.add(entry)
        return entry.path, self._best()

    def _report_save(
        self, run: Run, step: int, judged_by: storage.JudgedBy | None, where: tuple[Path, Path | None]
    ) -> None:
        """Announce a durable checkpoint, then remove what is no longer kept."""
        path, best = where
        if not self.weights_only or run.last_checkpoint in (None, self._last):  # else it is one that can be resumed
            run.last_checkpoint = path
        self._last = path
        self._announce_best(run, best)
        self._saved.hold(step)
        run.emit(CheckpointSaved(path, is_best=best == path))
        replaced, self._replaces = self._replaces, []
        measured = self._judge() if self._value_at == step else None  # while it was written, too
        self._tidy(run, path, None if measured == judged_by else measured, replaced)

    def _judge(self) -> storage.JudgedBy | None:
        """Return the newest measurement, by which a checkpoint of the same weights is judged."""
        return None if self.monitor is None else (self.monitor.name, self.monitor.mode, self._value)

    def _tidy(self, run: Run, last: Path, judged_by: storage.JudgedBy | None, replaced: list[storage.Entry]) -> None:
        tidy = partial(self._put_in_order, last, judged_by, replaced)
        self._writer.do(run, tidy, partial(self._report_order, run), is_save=False)

    def _put_in_order(
        self, last: Path, judged_by: storage.JudgedBy | None, replaced: list[storage.Entry]
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Judge the newest if that is due, point to it and the best, and remove what is no longer kept.

        Returns:
            The best, and what went, and why.
        """
        store = self._store
        assert store is not None
        if judged_by is not None and (entry := self._kept.entry(last)) is not None:
            self._kept.add(store.judge(entry, judged_by))
        dropped = [(path, f"{last.name} has the same step") for path in self._kept.drop_replaced(store.is_pinned)]
        best = self._best()
        store.point("last", last)
        store.point("best", best)
        dropped += [(path, self._kept.rule) for path in self._kept.drop(store.is_pinned)]
        own = [(path, reason) for path, reason in dropped if store.remove(path)]
        others = [(each.path, "on_existing='replace'") for each in replaced if store.remove(each.path, each.training)]
        return best, own + others

    def _report_order(self, run: Run, done: tuple[Path | None, list[tuple[Path, str]]]) -> None:
        best, removed = done
        self._announce_best(run, best)
        for path, reason in removed:
            run.emit(CheckpointPruned(path, reason))


def _check_paths(folder: object, resume: object) -> None:
    if not isinstance(folder, str | Path) or not isinstance(resume, str | Path | None):
        raise TypeError(f"Checkpoint takes paths: folder={folder!r}, resume={resume!r} ('auto', a path, or None).")
    if isinstance(resume, str) and resume != "auto" and not Path(resume).suffix and not Path(resume).exists():
        raise ValueError(f"resume is None, 'auto', or the path of a checkpoint's .pth file, got {resume!r}.")
