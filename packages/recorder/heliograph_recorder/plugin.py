"""The `Recorder` plugin: record a run for `replay`, `explain` and `timeline`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import heliograph as h
from heliograph.events import (
    CATALOGUE,
    Event,
    OrderedSignal,
    PluginName,
    Receiver,
    Subscription,
    current_owner,
    is_within,
)
from heliograph.spi import check_flag, check_path, check_whole_number

from . import attempt_facts
from .attempt_recorder import AttemptRecorder, OpenBlock
from .format.lines import counter_values
from .format.plain import to_plain
from .format.records import Counters
from .format.writer import RecordingWriter

if TYPE_CHECKING:
    from .digests.collector import DigestCollector

NOTHING: Mapping[str, Any] = {}
MAX_CUSTOM = 1_000  # emissions of a custom event; later ones are sampled


@dataclass(frozen=True, slots=True)
class Digests:
    """Options for the digests of `Recorder(digests=...)`, with which `diverge` finds the first difference of two runs.

    Every batch has digests of its contents, of the random generators after it, of the optimizer options, and of the
    loss. Digests of gradients and weights take time in proportion to their size, so you choose how often they are
    taken. Nothing waits for a device: its values are read some batches later.

    Args:
        gradients: take digests of the gradient norms every so many optimizer steps; 0 for none.
        weights: take digests of the weights every so many optimizer steps; 0 for none.

    Raises:
        ValueError: an argument is not a whole number of at least 0.
    """

    gradients: int = 100
    weights: int = 100

    def __post_init__(self) -> None:
        for name in ("gradients", "weights"):
            check_whole_number(name, getattr(self, name), of="optimizer steps", at_least=0)


class Recorder(h.Plugin):
    """Record the events, metrics, requests, failures and handler times of a run.

    A training is recorded in one file, `<run>_<date>_<time>.recording`. A resumed run continues the file named in its
    checkpoint. `test` and `validate` add to the file of the last fit. The path is `run.report.recording` and
    `result.recording`. A kill loses the batches of the last second, or of 1 % of the time so far, up to 10 seconds.

    While a run is recorded, its clock advances only at batches and events, in hundredths of a second. Plugins therefore
    see the same times in the run and in a replay. With several ranks, the main rank records.

    Args:
        folder: the folder of the recordings; created if it is missing.
        losses: whether to record the loss of every batch; with several optimizers, the last loss of the batch.
        sample: handlers of the events of every batch are timed in the first 256 batches, then in one batch of
            `sample`. Other handlers are always timed.
        digests: whether to record digests of every batch, so that `diverge` can find the first difference of two runs:
            True, or `Digests(...)` to set how often gradients and weights are digested.

    Raises:
        TypeError: an argument has a wrong type.
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
        self.folder, self.losses = Path(folder), losses
        if not isinstance(digests, bool | Digests):
            raise TypeError(
                f"Recorder(digests=) takes True, False or Digests(gradients=..., weights=...); got {digests!r}."
            )
        self.digests = (Digests() if digests else None) if isinstance(digests, bool) else digests
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"Recorder(folder) takes the path of a folder, but {self.folder} is a file.")
        self.path: Path | None = None
        self._attempt: AttemptRecorder | None = None
        self._block: OpenBlock | None = None
        self._owner = PluginName(self.name)
        self._connected: dict[OrderedSignal[Any], Receiver] = {}  # in addition to the marked handlers
        self._collector: DigestCollector | None = None
        self._awaiting_metrics: h.Log | h.ValidationEnd | h.TestEnd | h.PredictEnd | None = None
        self._loop_metrics: set[str] = set()  # the metrics that plugins did not add
        self._error: BaseException | None = None
        self._continues_file = self._is_over = False
        self._sets: dict[str, int] = {}
        self._custom: dict[type[Event], int] = {}

    def describe(self, run: h.Run) -> str:
        """Return the path of the recording."""
        return f"records to {self.path or self.folder}"

    def rehearse(self, folder: Path) -> list[Path]:
        """Record to another folder; return the previous one."""
        previous, self.folder, self.path = self.folder, folder, None
        return [previous]

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        """Close the previous run; a loaded state decides whether its file is continued."""
        self.close()
        self._attempt = self._block = self.path = None
        self._note(run, event)

    @h.on(h.BatchEnd, lane=h.Lane.TRANSFORM)
    def count(self, run: h.Run, event: h.BatchEnd) -> None:
        """Record the counters of a batch, and set the run's clock for all handlers."""
        block = self._block
        if block is None or len(block.values) >= block.stop:
            self._ready(run).add_batch(run)
        else:
            block.add(run)

    @h.on(h.CheckpointLoaded, lane=h.Lane.TRANSFORM)
    def note_load(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        """Record the position at which the run continues."""
        self._add_digests()
        self._ready(run).handle_load()
        counters = Counters(*counter_values(run.origin))
        origin = asdict(counters) | {"seconds": run.origin.earlier_seconds}
        self._subscribe(run)
        extra = {
            "origin": origin,
            "in_boundary": run.checkpoints.in_boundary,
            "planned_steps": run.length.planned_steps,
        }
        if run.checkpoints.forked_from is not None:
            extra["forked_from"] = to_plain(run.checkpoints.forked_from)
        extra["training"] = run.checkpoints.training_id
        self._note(run, event, extra)

    @h.on(h.EpochStart, h.ValidationStart, h.TestStart, h.PredictStart, lane=h.Lane.TRANSFORM, optional=True)
    def note_start(self, run: h.Run, event: h.EpochStart | h.ValidationStart | h.TestStart | h.PredictStart) -> None:
        """Record the number of batches of an epoch or an evaluation."""
        self._subscribe(run)
        self._sets.clear()
        is_epoch = isinstance(event, h.EpochStart)
        batches = run.length.batches_per_epoch if is_epoch else run.data.evaluation_batches
        self._note(run, event, {"batches": batches})

    @h.on(h.ValidationBatchEnd, h.TestBatchEnd, h.PredictBatchEnd, lane=h.Lane.TRANSFORM, optional=True)
    def count_evaluation(self, run: h.Run, event: h.ValidationBatchEnd | h.TestBatchEnd | h.PredictBatchEnd) -> None:
        """Count the batches of a set."""
        self._sets[event.dataset] = self._sets.get(event.dataset, 0) + 1

    @h.on(h.Log, h.ValidationEnd, h.TestEnd, h.PredictEnd, lane=h.Lane.TRANSFORM, optional=True)
    def expect_metrics(self, run: h.Run, event: h.Log | h.ValidationEnd | h.TestEnd | h.PredictEnd) -> None:
        """Begin an entry of metrics, to which other handlers may add."""
        self._finish_metrics()
        self._ready(run).begin_event(event.name)
        self._awaiting_metrics, self._loop_metrics = event, set(event.metrics)

    @h.on(h.Log, h.ValidationEnd, h.TestEnd, h.PredictEnd, lane=h.Lane.REPORT, optional=True)
    def note_metrics(self, run: h.Run, event: h.Log | h.ValidationEnd | h.TestEnd | h.PredictEnd) -> None:
        """Record the metrics, after all handlers that add to them."""
        self._finish_metrics()
        attempt = self._ready(run)
        attempt.add_times()
        attempt.write()

    @h.on(h.Replay, lane=h.Lane.TRANSFORM)
    def note_replay(self, run: h.Run, event: h.Replay) -> None:
        """Record the beginning and the end of a replay of the loader."""
        if event.done in (0, event.batches):
            self._note(run, event)

    @h.on(h.ValidationCut, h.ChangeServed, h.SavePoint, h.EpochEnd, lane=h.Lane.TRANSFORM, optional=True)
    def note_moment(self, run: h.Run, event: h.ValidationCut | h.ChangeServed | h.SavePoint | h.EpochEnd) -> None:
        """Record a cut evaluation, a change of the run, a save point, or the end of an epoch."""
        self._add_digests()
        extra = {"batches": dict(self._sets)} if isinstance(event, h.ValidationCut) else {}
        self._note(run, event, extra)

    @h.on(h.LastBoundary, h.TrainEnd, lane=h.Lane.TRANSFORM)
    def note_end(self, run: h.Run, event: h.LastBoundary | h.TrainEnd) -> None:
        """Record the end of the training."""
        self._add_digests()
        self._note(run, event)

    @h.on(
        h.CheckpointSaved,
        h.CheckpointPruned,
        h.ResumeVerified,
        h.Verdict,
        h.LateResult,
        lane=h.Lane.TRANSFORM,
        optional=True,
    )
    def note_fact(self, run: h.Run, event: Event) -> None:
        """Record a saved, pruned, verified or evaluated checkpoint, or a verdict."""
        extra = {"training": run.checkpoints.training_id} if isinstance(event, h.CheckpointSaved) else {}
        self._note(run, event, extra, sets_clock=False)

    @h.on(h.PluginChanged, h.PluginFailed, lane=h.Lane.TRANSFORM)
    def note_plugin(self, run: h.Run, event: h.PluginChanged | h.PluginFailed) -> None:
        """Record a change or a failure of a plugin; there may be new handlers and signals."""
        self._subscribe(run)
        attempt = self._attempt
        if isinstance(event, h.PluginFailed) and event.plugin == current_owner() and attempt is not None:
            attempt.add_event(event.name, attempt_facts.fields_of(event))  # not written: the write may have failed
        else:
            self._note(run, event, sets_clock=False)

    def note_own_end(self, run: h.Run, event: h.PluginChanged) -> None:
        """Record that this recorder is switched off."""
        if (
            event.plugin == current_owner()
            and event.change in ("disabled", "unregistered")
            and self._attempt is not None
        ):
            self._attempt.add_event(event.name, {**attempt_facts.fields_of(event), "ends_recording": True})

    @h.on(h.RunFailed, lane=h.Lane.TRANSFORM)
    def note_failure(self, run: h.Run, event: h.RunFailed) -> None:
        """Record the error."""
        self._error = event.error
        self._finish_metrics()
        try:
            self._add_digests()
        except RuntimeError as failure:  # the device has failed
            run.note(f"the digests of the last batches are lost: {failure}")
            self._stop_digests()
        self._note(run, event, attempt_facts.failure_of(event))

    @h.on(h.RunClosed, lane=h.Lane.REPORT, after=("jsonl_log", "tensorboard", "file_log"))
    def end(self, run: h.Run, event: h.RunClosed) -> None:
        """Record the end of the run and the times of handlers."""
        self._finish_metrics()
        self._add_digests()
        error, self._error = self._error, None
        self._ready(run).add_times(now=True)
        self._note(run, event, attempt_facts.ending_of(run, event, error))
        self._is_over = True

    def note_custom(self, run: h.Run, event: Event) -> None:
        """Record a custom event; very frequent ones are sampled."""
        kind = type(event)
        number = self._custom[kind] = self._custom.get(kind, 0) + 1
        if number <= MAX_CUSTOM or number % self.sample == 0:
            emission = {"emission": number} if number > MAX_CUSTOM else {}
            self._note(run, event, emission, sets_clock=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the file."""
        self._add_digests()
        return {"file": None if self.path is None else self.path.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the file in a resumed run, if it still exists."""
        self._add_digests()
        if state["file"] is not None and (self._attempt is None or self._attempt.path is None):
            self.path, self._continues_file = self.folder / Path(state["file"]).name, True

    def flush(self) -> None:
        """Write all entries so far, including the last batches and their digests."""
        self._add_digests()
        if self._attempt is not None:
            self._attempt.end_block()
            self._attempt.write()

    def close(self) -> None:
        """Write all entries, close the file and restore the run's clock."""
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
        for signal, handler in self._connected.items():
            signal.disconnect(handler)
        self._connected.clear()
        self._attempt, self._block = (None, None) if self._is_over else (attempt, attempt.block)
        attempt.close()

    def _add_digests(self) -> None:
        if self._collector is not None:
            self._collector.finish()

    def _note(self, run: h.Run, event: Event, extra: Mapping[str, Any] = NOTHING, *, sets_clock: bool = True) -> None:
        attempt = self._ready(run)
        attempt.add_event(event.name, {**attempt_facts.fields_of(event), **extra}, sets_clock=sets_clock)
        attempt.write()

    def _finish_metrics(self) -> None:
        event, self._awaiting_metrics = self._awaiting_metrics, None
        if event is not None and self._attempt is not None:
            done = {} if isinstance(event, h.Log) else {"batches": dict(self._sets)}
            metrics = attempt_facts.metrics_of(event.metrics, self._loop_metrics)
            self._attempt.finish_event({**metrics, **done})

    def _ready(self, run: h.Run) -> AttemptRecorder:
        attempt = self._attempt
        if attempt is None or attempt.progress is not run.progress:
            attempt = self._begin(run)
        if self._collector is None and self.digests is not None and run.optimizers and self._error is None:
            self._collector = self._begin_digests(run, attempt, self.digests)
        if attempt.writer is None and not is_within(h.TrainStart.name):
            attempt.open(self._open_writer(run, attempt.path or self.path))
            self.path = run.report.recording = attempt.path
        return attempt

    def _begin(self, run: h.Run) -> AttemptRecorder:
        if run.report.is_replay:
            raise h.NotRecorded("a training that could be recorded")
        self.close()
        attempt = self._attempt = AttemptRecorder(run, self.sample, losses=self.losses)
        self._block = attempt.block
        if attempt.attempt.phase == "train" and not self._continues_file:
            self.path = None
        self._is_over, self._error, self._custom = False, None, {}
        self._owner = PluginName(current_owner() or self.name)
        self._subscribe(run)
        return attempt

    def _begin_digests(self, run: h.Run, attempt: AttemptRecorder, digests: Digests) -> DigestCollector:
        from .digests.collector import DigestCollector

        collector = DigestCollector(digests, attempt.add_digests)
        collector.attach(run.bus, current_owner() or self.name)
        return collector

    def _subscribe(self, run: h.Run) -> None:
        """Subscribe to the signals that exist by now, and time them."""
        if self._attempt is None:
            return
        self._pause_if_alone(run, h.Log, self.expect_metrics, self.note_metrics)
        self._pause_if_alone(run, h.Replay, self.note_replay)
        # The marked handlers are paused when the recorder is switched off.
        self._connect(run.bus.signal(h.PluginChanged), self.note_own_end)
        for signal in run.bus.signals():
            if signal.event not in CATALOGUE:
                self._connect(signal, self.note_custom)
        self._attempt.timer.attach()

    def _connect(self, signal: OrderedSignal[Any], handler: Receiver) -> None:
        if signal not in self._connected:
            subscription = Subscription((h.Lane.TRANSFORM, sys.maxsize), self._owner)
            signal.connect(handler, weak=False, subscription=subscription)
            self._connected[signal] = handler

    def _pause_if_alone(self, run: h.Run, event: type[Event], *handlers: Receiver) -> None:
        """Listen to an event only if others do: without a handler the loop collects no losses, and logs a replay."""
        signal = run.bus.signal(event)
        owners = {subscription.owner for subscription in signal.subscriptions.values() if not subscription.paused}
        is_needed = bool(owners - {self._owner})
        if event is h.Log and not is_needed:  # a plugin may request logs although no other plugin handles them
            is_needed = "log" in run.plugins.declared("asks")
        if is_needed != (self._owner in owners):
            for handler in handlers:
                signal.pause(handler, paused=not is_needed)

    def _open_writer(self, run: h.Run, path: Path | None) -> RecordingWriter:
        if path is not None and path.exists():
            try:
                return RecordingWriter.reopen(path)
            except ValueError as error:
                run.note(f"the recording continues in a new file: {error}")
        return RecordingWriter.create(self.folder, run.name)
