"""Record what happens in a run, for `heliograph_recorder.replay`, `explain` and `timeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from heliograph import (
    BatchEnd,
    ChangeServed,
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    Lane,
    LastBoundary,
    Log,
    NotRecorded,
    Plugin,
    PluginChanged,
    PluginFailed,
    PredictBatchEnd,
    PredictEnd,
    PredictStart,
    Replay,
    ResumeVerified,
    Run,
    RunClosed,
    RunFailed,
    SavePoint,
    TestBatchEnd,
    TestEnd,
    TestStart,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
    Verdict,
    on,
)
from heliograph.events import Event
from heliograph.spi import Receiver, check_flag, check_path, check_whole_number, current_owner, is_within

from . import attempt_facts
from .attempt_recorder import AttemptRecorder, counters_of
from .digests.chain import Chain
from .digests.options import Digests, digests_of
from .format.plain import to_plain
from .format.tail import REGULAR
from .format.writer import Writer
from .open_block import OpenBlock

if TYPE_CHECKING:
    from .digests.collector import DigestCollector
import sys
from collections.abc import Sequence

from heliograph import OrderedSignal
from heliograph.events import CATALOGUE, PluginName
from heliograph.spi import Subscription


class ExtraSubscriptions:
    """Connects a recorder to custom events, and disconnects it from events that would cost time without other handlers.

    Without a handler of `Log` the loop collects no losses; without one of `Replay` it logs a line instead. A recorder
    changes neither: it receives these events only if others do.

    Args:
        owner: the recorder's name on the bus.
        custom: the handler of events that are not in the catalogue.
        optional: by event, the handlers that are called only if there are others.
        always: by event, a handler that is called although the recorder was switched off, until it is closed.
    """

    def __init__(
        self,
        owner: str,
        custom: Receiver,
        optional: Mapping[type[Event], Sequence[Receiver]],
        always: Mapping[type[Event], Receiver],
    ) -> None:
        self._owner, self._custom, self._optional, self._always = PluginName(owner), custom, optional, always
        self._connected: dict[OrderedSignal[Any], Receiver] = {}

    def attach(self, run: Run) -> None:
        for event, handlers in self._optional.items():
            self._pause_or_resume(run, event, handlers)
        for event, handler in self._always.items():
            self._connect(run.bus.signal(event), handler)
        for signal in run.bus.signals():
            if signal.event not in CATALOGUE:
                self._connect(signal, self._custom)

    def detach(self) -> None:
        for signal, handler in self._connected.items():
            signal.disconnect(handler)
        self._connected.clear()

    def _connect(self, signal: OrderedSignal[Any], handler: Receiver) -> None:
        if signal not in self._connected:
            subscription = Subscription((Lane.TRANSFORM, sys.maxsize), self._owner)
            signal.connect(handler, weak=False, subscription=subscription)
            self._connected[signal] = handler

    def _pause_or_resume(self, run: Run, event: type[Event], handlers: Sequence[Receiver]) -> None:
        signal = run.bus.signal(event)
        owners = {each.owner for each in signal.subscriptions.values() if not each.paused}
        wanted = bool(owners - {self._owner})
        if event is Log and not wanted:  # a plugin may request logs although none handles them
            wanted = "log" in run.plugins.declared("asks")
        if wanted != (self._owner in owners):
            for handler in handlers:
                signal.pause(handler, paused=not wanted)


MAX_CUSTOM = 1_000  # emissions of a custom event; of later ones a sample is recorded


class Recorder(Plugin):
    """Record events, counters, metrics, requests with who made them and why, failures, and the time of every handler.

    One file `<run>_<date>_<time>.recording` holds a training: a resumed run continues the file that its checkpoint
    names; `test` and `validate` add to that of the last fit. A killed run leaves everything up to its last batch. The
    file is `run.report.recording` and `result.recording`.

    While it records, the run's clock advances only at batches and events, in hundredths of a second, so that the
    recording holds the same times that plugins see. On several ranks the main rank records.

    Args:
        folder: where to write; created if it is missing.
        losses: whether to record the loss of every batch; with several optimizers, the last loss of the batch.
        sample: the handlers of the events of every batch are timed in the first 256 batches, then in one batch of
            `sample`; handlers of other events always.
        digests: whether to record digests of every batch, by which `diverge` finds where two runs begin to differ:
            True, or `Digests(...)` to say how often those of gradients and weights are taken.

    Raises:
        TypeError: an argument has another type.
        ValueError: `sample` is not a whole number of at least 1, or `folder` is a file.
    """

    policy = "observer"
    draws = False
    ranks = "main"
    exclusive = ("recorder",)

    def __init__(
        self, folder: str | Path, *, losses: bool = False, sample: int = 1000, digests: bool | Digests = False
    ) -> None:
        check_path("Recorder(folder)", folder, "a folder")
        check_flag("losses", losses)
        self.sample = check_whole_number("sample", sample, of="batches", at_least=1)
        self.folder, self.losses, self.digests = Path(folder), losses, digests_of(digests)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"Recorder(folder) takes the path of a folder, but {self.folder} is a file.")
        self.path: Path | None = None
        self._attempt: AttemptRecorder | None = None
        self._block: OpenBlock | None = None
        self._subscriptions: ExtraSubscriptions | None = None
        self._collector: DigestCollector | None = None
        self._chain: Mapping[str, Any] | None = None  # where that of a resumed run was
        self._awaiting_metrics: Log | ValidationEnd | TestEnd | PredictEnd | None = None
        self._own_metrics: set[str] = set()  # of the loop: others were added by plugins
        self._error: BaseException | None = None
        self._continues_file = self._is_over = False
        self._sets: dict[str, int] = {}
        self._custom: dict[type[Event], int] = {}

    def describe(self, run: Run) -> str:
        """Say where the recording is."""
        return f"records to {self.path or self.folder}"

    def rehearse(self, folder: Path) -> list[Path]:
        """Record elsewhere."""
        former, self.folder, self.path = self.folder, folder, None
        return [former]

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Close the former run; whether its file is continued depends on the state that is loaded."""
        self.close()
        self._attempt = self._block = self.path = self._chain = None
        self._note(run, event, {})

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def count(self, run: Run, event: BatchEnd) -> None:
        """Record the counters of a batch, and set the run's clock for all handlers."""
        block, progress = self._block, run.progress
        if block is None or (at := block.at) >= block.stop:
            self._ready(run).add_batch(run)
        elif (
            progress.batch - at == block.batch
            and progress.steps - at == block.steps
            and progress.samples - at * block.size == block.samples
            and progress.skipped_steps + progress.skipped_batches + progress.tokens == block.rest
            and monotonic() < block.due
        ):
            block.buffer[at] = REGULAR
            block.at = at + 1
        else:
            block.add(run)

    @on(CheckpointLoaded, lane=Lane.TRANSFORM)
    def note_load(self, run: Run, event: CheckpointLoaded) -> None:
        """Note where the run continues."""
        self._add_digests()
        self._ready(run).handle_load()
        origin = asdict(counters_of(run.origin)) | {"seconds": run.origin.earlier_seconds}
        self._subscribe(run)
        more = {"origin": origin, "in_boundary": run.checkpoints.in_boundary, "planned_steps": run.length.planned_steps}
        if run.checkpoints.forked_from is not None:
            more["forked_from"] = to_plain(run.checkpoints.forked_from)
        more["training"] = run.checkpoints.training_id
        self._note(run, event, {**attempt_facts.fields_of(event), **more})

    @on(EpochStart, lane=Lane.TRANSFORM)
    def note_epoch(self, run: Run, event: EpochStart) -> None:
        """Note the length of the epoch."""
        self._subscribe(run)
        self._note(run, event, {**attempt_facts.fields_of(event), "batches": run.length.batches_per_epoch})

    @on(ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM, optional=True)
    def note_evaluation(self, run: Run, event: ValidationStart | TestStart | PredictStart) -> None:
        """Note the number of batches."""
        self._subscribe(run)
        self._sets.clear()
        self._note(run, event, {"batches": run.data.evaluation_batches})

    @on(ValidationBatchEnd, TestBatchEnd, PredictBatchEnd, lane=Lane.TRANSFORM, optional=True)
    def count_evaluation(self, run: Run, event: ValidationBatchEnd | TestBatchEnd | PredictBatchEnd) -> None:
        """Count the batches of a set."""
        self._sets[event.dataset] = self._sets.get(event.dataset, 0) + 1

    @on(Log, ValidationEnd, TestEnd, PredictEnd, lane=Lane.TRANSFORM, optional=True)
    def expect_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> None:
        """Begin the entry of metrics; other handlers may add to them before they are recorded."""
        self._finish_metrics()
        self._ready(run).begin_event(event.name)
        self._awaiting_metrics, self._own_metrics = event, set(event.metrics)

    @on(Log, ValidationEnd, TestEnd, PredictEnd, lane=Lane.REPORT, optional=True)
    def note_metrics(self, run: Run, event: Log | ValidationEnd | TestEnd | PredictEnd) -> None:
        """Note the metrics, after all handlers that add to them."""
        self._finish_metrics()
        attempt = self._ready(run)
        attempt.add_times()
        attempt.write()

    @on(Replay, lane=Lane.TRANSFORM)
    def note_replay(self, run: Run, event: Replay) -> None:
        """Note the beginning and the end of a replay of the loader."""
        if event.done in (0, event.batches):
            self._note(run, event, attempt_facts.fields_of(event))

    @on(ValidationCut, lane=Lane.TRANSFORM)
    def note_cut(self, run: Run, event: ValidationCut) -> None:
        """Note how many batches the validation or test had done."""
        self._note(run, event, {**attempt_facts.fields_of(event), "batches": dict(self._sets)})

    @on(ChangeServed, SavePoint, EpochEnd, lane=Lane.TRANSFORM, optional=True)
    def note_moment(self, run: Run, event: ChangeServed | SavePoint | EpochEnd) -> None:
        """Note a change of the run, a save point, or the end of an epoch."""
        self._add_digests()
        self._note(run, event, attempt_facts.fields_of(event))

    @on(LastBoundary, TrainEnd, lane=Lane.TRANSFORM)
    def note_end(self, run: Run, event: LastBoundary | TrainEnd) -> None:
        """Note the end of the training."""
        self._add_digests()
        self._note(run, event, attempt_facts.fields_of(event))

    @on(CheckpointSaved, CheckpointPruned, ResumeVerified, Verdict, lane=Lane.TRANSFORM, optional=True)
    def note_fact(self, run: Run, event: CheckpointSaved | CheckpointPruned | ResumeVerified | Verdict) -> None:
        """Note a checkpoint that was saved, pruned or compared with, or a verdict."""
        more = {"training": run.checkpoints.training_id} if isinstance(event, CheckpointSaved) else {}
        self._note(run, event, {**attempt_facts.fields_of(event), **more}, sets_clock=False)

    @on(PluginChanged, PluginFailed, lane=Lane.TRANSFORM)
    def note_plugin(self, run: Run, event: PluginChanged | PluginFailed) -> None:
        """Note a change or a failure of a plugin; there may be new handlers and signals."""
        self._subscribe(run)
        attempt = self._attempt
        if isinstance(event, PluginFailed) and event.plugin == current_owner() and attempt is not None:
            attempt.add_event(event.name, attempt_facts.fields_of(event))  # unwritten: writing may be what failed
        else:
            self._note(run, event, attempt_facts.fields_of(event), sets_clock=False)

    def note_own_end(self, run: Run, event: PluginChanged) -> None:
        """Note that this recorder is switched off: nothing after it is in the recording."""
        if (
            event.plugin == current_owner()
            and event.change in ("disabled", "unregistered")
            and self._attempt is not None
        ):
            self._attempt.add_event(event.name, {**attempt_facts.fields_of(event), "ends_recording": True})

    @on(RunFailed, lane=Lane.TRANSFORM)
    def note_failure(self, run: Run, event: RunFailed) -> None:
        """Note the error."""
        self._error = event.error
        self._finish_metrics()
        try:
            self._add_digests()
        except RuntimeError as failure:  # the device has failed, with what lies on it
            run.note(f"the digests of the last batches are lost: {failure}")
            self._stop_digests()
        data = attempt_facts.failure_of(run, event, losses=self.losses)
        self._note(run, event, {**data, "batches": dict(self._sets)})

    @on(RunClosed, lane=Lane.REPORT, after=("jsonl_log", "tensorboard", "file_log"))
    def end(self, run: Run, event: RunClosed) -> None:
        """Note how the run ended, and the times of handlers."""
        self._finish_metrics()
        self._add_digests()
        error, self._error = self._error, None
        self._ready(run).add_times(now=True)
        self._note(run, event, attempt_facts.ending_of(run, event, error))
        self._is_over = True

    def note_custom(self, run: Run, event: Event) -> None:
        """Note an event that is not in the catalogue; of a very frequent one, a sample."""
        kind = type(event)
        number = self._custom[kind] = self._custom.get(kind, 0) + 1
        if number <= MAX_CUSTOM or number % self.sample == 0:
            emission = {"emission": number} if number > MAX_CUSTOM else {}
            self._note(run, event, {**attempt_facts.fields_of(event), **emission}, sets_clock=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the file's name, and where the chain of digests is."""
        file = {"file": None if self.path is None else self.path.name}
        if self._collector is None:
            return file
        self._add_digests()
        return {**file, "chain": self._collector.chain.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the chain, and the file of the resumed run if it still exists; a roll-back keeps its file."""
        self._add_digests()
        self._chain = state.get("chain")
        if self._collector is not None:
            self._collector.chain.load_state_dict(self._chain or Chain().state_dict())
        if state["file"] is not None and (self._attempt is None or self._attempt.path is None):
            self.path, self._continues_file = self.folder / Path(state["file"]).name, True

    def flush(self) -> None:
        """Write what was recorded until now, the digests of the last batches included."""
        self._add_digests()
        if self._attempt is not None:
            self._attempt.write()

    def close(self) -> None:
        """Write all entries and close the file; the run's clock runs again."""
        self._continues_file = False
        try:
            self._add_digests()
        finally:
            self._stop_digests()
            self._close_file()

    def _stop_digests(self) -> None:
        if self._collector is not None:
            self._collector.detach()
            self._collector = None

    def _close_file(self) -> None:
        if (attempt := self._attempt) is None:
            return
        self._finish_metrics()
        if self._subscriptions is not None:
            self._subscriptions.detach()
        self._attempt, self._block = (None, None) if self._is_over else (attempt, attempt.block)
        attempt.close()

    def _add_digests(self) -> None:
        if self._collector is not None:
            self._collector.finish()

    def _note(self, run: Run, event: Event, data: Mapping[str, Any], *, sets_clock: bool = True) -> None:
        attempt = self._ready(run)
        attempt.add_event(event.name, data, sets_clock=sets_clock)
        attempt.write()

    def _finish_metrics(self) -> None:
        event, self._awaiting_metrics = self._awaiting_metrics, None
        if event is not None and self._attempt is not None:
            done = {} if isinstance(event, Log) else {"batches": dict(self._sets)}
            metrics = attempt_facts.metrics_of(event.metrics, self._own_metrics)
            self._attempt.finish_event({**metrics, **done})

    def _ready(self, run: Run) -> AttemptRecorder:
        attempt = self._attempt
        if attempt is None or attempt.progress is not run.progress:
            attempt = self._begin(run)
        if self._collector is None and self.digests is not None and run.optimizers and self._error is None:
            self._collector = self._begin_digests(run, attempt, self.digests)
        if attempt.writer is None and not is_within(TrainStart.name):
            attempt.open(self._open_writer(run, attempt.path or self.path))
            self.path = run.report.recording = attempt.path
        return attempt

    def _begin(self, run: Run) -> AttemptRecorder:
        if run.report.is_replay:
            raise NotRecorded("a training that could be recorded")
        self.close()
        attempt = self._attempt = AttemptRecorder(run, self.sample, losses=self.losses)
        self._block = attempt.block
        if attempt.attempt.phase == "train" and not self._continues_file:
            self.path = None
        self._is_over, self._error, self._custom = False, None, {}
        optional: dict[type[Event], tuple[Receiver, ...]] = {
            Log: (self.expect_metrics, self.note_metrics),
            Replay: (self.note_replay,),
        }
        always: dict[type[Event], Receiver] = {
            PluginChanged: self.note_own_end
        }  # its marked handlers are paused when it is switched off
        owner = current_owner() or self.name
        self._subscriptions = ExtraSubscriptions(owner, self.note_custom, optional, always)
        self._subscribe(run)
        return attempt

    def _begin_digests(self, run: Run, attempt: AttemptRecorder, digests: Digests) -> DigestCollector:
        from .digests.collector import DigestCollector

        collector = DigestCollector(run, digests, attempt.add_digests)
        if self._chain is not None:
            collector.chain.load_state_dict(self._chain)
        collector.attach(run.bus, current_owner() or self.name)
        return collector

    def _subscribe(self, run: Run) -> None:
        if self._attempt is not None and self._subscriptions is not None:
            self._subscriptions.attach(run)
            self._attempt.timer.attach()

    def _open_writer(self, run: Run, path: Path | None) -> Writer:
        if path is not None and path.exists():
            try:
                return Writer.reopen(path)
            except ValueError as error:
                run.note(f"the recording continues in a new file: {error}")
        return Writer.create(self.folder, run.name)
