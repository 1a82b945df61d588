"""Replay one attempt entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from heliograph import Bus, Filter, GradientsReady, LastBoundary, StepEnd
from heliograph.events import Event, Phase

from ..format.records import (
    AttemptRecord,
    Batches,
    Counters,
    Entry,
    EventEntry,
    RepeatEntry,
    RequestEntry,
    change_of,
)
from ..verbs import SERVED
from .batches import BatchReplay, Boundary
from .entries import KINDS, MILESTONES, Entries, RecordedRequests, make_event
from .plugin_states import Snapshots, Switches
from .report import ReplayFindings
from .run import ReplayRun

# The events that may be emitted during a batch.
DURING_BATCHES: Final = (
    "plugin_changed", "plugin_failed", "checkpoint_saved", "checkpoint_pruned", "resume_verified", "verdict",
)  # fmt: skip


class AttemptReplay:
    """Replay one attempt.

    It does not run `core.loop`: the recording decides what happens, regardless of the requests of replayed plugins.
    After a kill or in a damaged file, entries are missing, and the remaining ones are not a path through the loop.

    Args:
        number: the number of the attempt, from 1.
        attempt: the recorded attempt.
        path: the recording.
        bus: the bus of the replay.
        replayed: the names of the replayed plugins.
        switches: the switches of the replayed plugins.
        snapshots: the states of the replayed plugins at saves.
        findings: the collector of the results.

    Attributes:
        run: the run that the plugins receive.
    """

    def __init__(
        self,
        number: int,
        attempt: AttemptRecord,
        path: Path,
        bus: Bus,
        replayed: Collection[str],
        switches: Switches,
        snapshots: Snapshots,
        findings: ReplayFindings,
    ) -> None:
        self._number, self._attempt, self._replayed = number, attempt, replayed
        self._switches, self._snapshots, self._findings = switches, snapshots, findings
        self._entries = Entries(attempt)
        self.run = ReplayRun(attempt, path, bus, findings.add, self._entries.rolls_back_to)
        self._requests = RecordedRequests(attempt, self._entries, self.run, replayed)
        self._boundary = Boundary(self.run, self._requests, findings)
        self._batches = BatchReplay(self.run, self._entries, self._requests, self._boundary)
        self._has_begun = False  # after the load of a resumed state
        self._actions: dict[str, Callable[[EventEntry], None]] = {
            "train_start": self._start,
            "checkpoint_loaded": self._load,
            "epoch_start": self._start_epoch,
            "epoch_end": self._end_epoch,
            "last_boundary": self._end_training,
            "train_end": self._end_training,
            "change_served": self._change_run,
            "log": self._emit_metrics,
            "validation_start": self._start_evaluation,
            "test_start": self._start_evaluation,
            "predict_start": self._start_evaluation,
            "validation_end": self._end_evaluation,
            "test_end": self._end_evaluation,
            "predict_end": self._end_evaluation,
            "validation_cut": self._cut_evaluation,
            "checkpoint_saved": self._set_checkpoint,
            "plugin_changed": self._change_plugin,
            "run_failed": self._fail,
        }

    def replay(self, length: int | None) -> None:
        """Replay all entries; `length` is the epoch's length in the previous attempt, in case this one has no epoch."""
        self.run.length.batches_per_epoch = self._entries.next_epoch_length(length)
        while (entry := self._entries.next()) is not None:
            self._replay(entry)
        self._boundary.close(None)

    @property
    def fails_next(self) -> bool:
        """True if the recorded run failed at the current position."""
        return self._entries.next_milestone_name() == "run_failed"

    def save(self) -> None:
        """During a `SavePoint`, take a snapshot, and replay the entries of the save."""
        while self._snapshots.unwritten and (entry := self._entries.next_of_save()) is not None:
            self._replay(entry)  # the end of a save in the background
        self._snapshots.take(self.run)
        while (entry := self._entries.next_of_save()) is not None:
            self._replay(entry)

    def _replay(self, entry: Entry) -> None:
        match entry:
            case EventEntry():
                self._replay_event(entry)
            case Batches():
                self._boundary.close(entry)
                self._check_gap(entry.first)
                self._batches.replay(entry)
            case RequestEntry():
                self._requests.read(entry)
            case RepeatEntry():
                self._requests.update_count(entry)

    def _replay_event(self, entry: EventEntry) -> None:
        if entry.event in MILESTONES:
            self._boundary.close(entry)
            if entry.event != "checkpoint_loaded":
                self._check_gap(entry.counters)
        if entry.event in ("log", "validation_start", "save_point"):
            self._boundary.serve(SERVED[entry.event])
        self._actions.get(entry.event, self._emit)(entry)

    def _emit(self, entry: EventEntry) -> Event | None:
        event = make_event(entry)
        if event is None or entry.event in DURING_BATCHES:  # the events of the batch set the counters
            self.run.progress.set_seconds(entry.counters.seconds)
        else:
            self.run.move_to(entry.counters)
        if event is None:  # a custom event, whose class is unknown
            return None
        self._requests.add_before(event.name)
        self.run.emit(event)
        return event

    def _start(self, entry: EventEntry) -> None:
        self.run.started = True
        Filter.plan_all(self.run)
        self._emit(entry)
        if self._entries.next_milestone_name() != "checkpoint_loaded":
            self._begin()

    def _begin(self, *, in_boundary: bool = False) -> None:
        """Begin or continue, with a boundary before the next epoch."""
        self._has_begun = True
        self._boundary.open(due=in_boundary or self.run.control.pending)

    def _load(self, entry: EventEntry) -> None:
        run, path, origin = self.run, entry.data["path"], Counters(**entry.data["origin"])
        if rolls_back := self._has_begun:
            self._discard_epoch()
        run.start_from(origin)
        run.checkpoints.in_boundary = entry.data["in_boundary"]
        run.length.planned_steps = entry.data["planned_steps"]
        Filter.plan_all(run)
        snapshot = self._snapshots.find(path, run.progress.state_dict())
        if snapshot is None:
            self._findings.note(
                f"attempt {self._number} continued from {path or 'a state'}, whose save is not recorded: the replayed "
                f"plugins continued without a restored state"
            )
            self._snapshots.reset_filters(run.origin)
        else:
            self._snapshots.restore(snapshot, run, rolls_back=rolls_back)
        run.checkpoints.last = None if path is None else Path(path)
        run.checkpoints.best = self._snapshots.best
        self._emit(entry)
        self._begin(in_boundary=run.checkpoints.in_boundary)

    def _discard_epoch(self) -> None:
        run = self.run
        run.control.discard_epoch()
        run.stepping.window, run.loss, run.is_last_seen = 0, None, False
        run.metrics.clear()

    def _start_epoch(self, entry: EventEntry) -> None:
        self.run.length.batches_per_epoch = entry.data["batches"]
        self._emit(entry)
        if not entry.data["resumed"]:
            self._boundary.open(due=self.run.control.pending)

    def _flush(self, place: Counters) -> None:
        """Step with the gradients of a last, partial window, as the loop does."""
        run = self.run
        if run.stepping.window and place.steps + place.skipped_steps > run.progress.steps + run.progress.skipped_steps:
            self._batches.close_window(place.steps, place.skipped_steps)
            run.control.close_batch()
        run.loss = None

    def _end_epoch(self, entry: EventEntry) -> None:
        self._flush(entry.counters)
        self.run.control.close_epoch()
        self.run.stepping.window, self.run.is_last_seen = 0, False
        self.run.length.batches_per_epoch = self._entries.next_epoch_length(self.run.length.batches_per_epoch)
        self._emit(entry)
        self._boundary.open(due=True)

    def _end_training(self, entry: EventEntry) -> None:
        if not self.run.finished:
            self._finish(entry.counters)
            if entry.event != "last_boundary":
                self.run.emit(LastBoundary())
        self._emit(entry)
        self._boundary.open(due=True, last=True)

    def _finish(self, place: Counters) -> None:
        self._flush(place)
        if self._attempt.status == "stopped" and not self.run.control.stopped:
            self._findings.note(
                f"attempt {self._number} was stopped at epoch {place.epoch} batch {place.batch} step {place.steps}: "
                f"with the replayed plugins it would have continued, but the continuation is not recorded"
            )
        self.run.finished = True

    def _change_run(self, entry: EventEntry) -> None:
        self._boundary.serve_change(change_of(entry.data))
        self._emit(entry)

    def _emit_metrics(self, entry: EventEntry) -> None:
        event: Any = self._emit(entry)
        self.run.metrics.update(event.metrics)

    def _start_evaluation(self, entry: EventEntry) -> None:
        self.run.phase = _phase_of(entry.event)
        self.run.data.evaluation_batches = entry.data["batches"]
        self.run.control.is_evaluating = True
        self._emit(entry)

    def _end_evaluation(self, entry: EventEntry) -> None:
        """End an evaluation that was not cut short, even if a replayed plugin requested it."""
        run = self.run
        self._replay_evaluation(entry)
        run.control.cut_request = None
        run.control.close_validation()
        self._emit_metrics(entry)
        run.progress.validations += run.trains  # after the event, as in the loop
        run.phase = self._attempt.phase

    def _cut_evaluation(self, entry: EventEntry) -> None:
        run, control = self.run, self.run.control
        self._replay_evaluation(entry)
        control.cut_request = cut = control.cut_request or self._requests.cut
        control.close_validation()
        self._emit(entry)
        if cut is not None and (run.finished or not run.started):
            control.stop_once(cut)
        run.phase = self._attempt.phase

    def _replay_evaluation(self, entry: EventEntry) -> None:
        """Replay the batches of an evaluation, given the entry of its end, if they have handlers."""
        run = self.run
        if run.phase == "train":  # the start is missing in the recording
            run.phase = _phase_of(entry.event)
        batch_start: Any = KINDS[f"{run.phase}_batch_start"]
        batch_end: Any = KINDS[f"{run.phase}_batch_end"]
        before, after = run.bus.signal(batch_start), run.bus.signal(batch_end)
        run.control.is_evaluating, cut = True, run.control.cut_request
        if before.chain or after.chain:
            datasets = [dataset for dataset, batches in entry.data["batches"].items() for _ in range(batches)]
            run.progress.evaluated = 0
            for number, dataset in enumerate(datasets, 1):
                before.emit(run, batch_start(dataset))
                run.progress.evaluated = number
                after.emit(run, batch_end(dataset))
                if run.control.cut_request is not cut:  # a replayed plugin would have ended it here
                    break
        run.control.is_evaluating = False

    def _set_checkpoint(self, entry: EventEntry) -> None:
        path = Path(entry.data["path"])
        self.run.checkpoints.last = path
        if entry.data["is_best"]:
            self.run.checkpoints.best = path
        self._snapshots.set_path(str(path), is_best=entry.data["is_best"])
        self._emit(entry)

    def _change_plugin(self, entry: EventEntry) -> None:
        name = entry.data["plugin"]
        if name in self._replayed:
            self.run.progress.set_seconds(entry.counters.seconds)
            self._switches.apply(name, entry.data["change"])
        else:
            self._emit(entry)

    def _fail(self, entry: EventEntry) -> None:
        self.run.phase = entry.data["phase"]
        self._emit(entry)

    def _check_gap(self, place: Counters) -> None:
        """Move to a place if batches before it are not recorded."""
        if place.batches != self.run.progress.batches:
            self._findings.note(
                f"attempt {self._number}: not every batch before epoch {place.epoch} batch {place.batch} is recorded"
            )
            self.run.move_to(place)


def _phase_of(event: str) -> Phase:
    phases: tuple[Phase, ...] = "validation", "test", "predict"
    return next((phase for phase in phases if event.startswith(phase)), "validation")


def plugins_on_steps(bus: Bus) -> set[str]:
    """Return the plugins with handlers of single optimizer steps."""
    signals = (bus.signal(event) for event in (GradientsReady, StepEnd))
    return {str(subscription.owner) for signal in signals for subscription in signal.subscriptions.values()}
