"""Replay one attempt entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import heliograph as h
from heliograph.events import Event, OrderedSignal, Phase, Request

from ..format.records import (
    AttemptRecord,
    Batch,
    Batches,
    Counters,
    EventEntry,
    RepeatEntry,
    RequestEntry,
    slice_block,
)
from ..verbs import SERVED
from .entries import (
    BATCHES,
    CHECKPOINTS,
    KINDS,
    Entries,
    RecordedRequests,
    ReplayEntry,
    is_during,
    is_of_event,
    is_of_save,
    make_event,
)
from .run import UNREAD, ReplayRun

if TYPE_CHECKING:
    from .replay import ReplaySession

DURING_BATCHES: Final = ("plugin_changed", "plugin_failed", *CHECKPOINTS, "verdict")  # may be emitted during a batch
CONTINUES: Final = (BATCHES, "epoch_start", "checkpoint_loaded")
HOT = h.BatchStart, h.ForwardEnd, h.BackwardEnd, h.GradientsReady, h.StepEnd, h.BatchEnd, h.ShouldStop
PHASES: Final[dict[str, Phase]] = {"validation_start": "validation", "test_start": "test", "predict_start": "predict"}


class AttemptReplay:
    """Replay one attempt.

    It does not run `core.loop`: the recording decides what happens, regardless of the requests of replayed plugins.

    Args:
        session: the replay.
        attempt: the recorded attempt.

    Attributes:
        run: the run that the plugins receive.
    """

    def __init__(self, session: ReplaySession, attempt: AttemptRecord) -> None:
        self._session, self._attempt = session, attempt
        self._entries = entries = Entries(attempt)
        self.run = ReplayRun(attempt, session.recording.path, session.bus, entries)
        history = self.run.control.history
        history.watcher = lambda: session.add_request(history[-1])
        self._requests = RecordedRequests(self.run.control, session.names)
        self._signals: dict[type[Event], OrderedSignal[Any]] = {kind: session.bus.signal(kind) for kind in HOT}
        self._has_begun = False  # after the load of a resumed state

    def replay(self) -> None:
        self.run.batches_per_epoch = self._entries.first_epoch_length()
        while (entry := self._entries.next()) is not None:
            self._replay(entry)

    @property
    def fails_next(self) -> bool:
        """True if the recorded run failed at the current position."""
        return self._entries.milestone() == "run_failed"

    def replay_save(self) -> None:
        """Replay the entries of a save, during its `SavePoint`."""
        while is_of_save(self._entries.peek()):
            self._replay(self._entries.next())

    def _replay(self, entry: ReplayEntry | None) -> None:
        match entry:
            case EventEntry():
                self._replay_event(entry)
            case Batches():
                self._open_block(entry)
            case Batch():
                self._replay_batch(entry)
            case RequestEntry() | RepeatEntry():
                self._requests.read(entry)

    def _replay_event(self, entry: EventEntry) -> None:
        data = entry.data
        if entry.event == "plugin_changed" and data["plugin"] in self._session.names:
            self.run.progress.set_seconds(entry.counters.seconds)
            self._session.toggle(data["plugin"], on=data["change"] in ("enabled", "registered"))
            return
        self._prepare(entry)
        self._emit(entry)
        self._continue(entry)

    def _prepare(self, entry: EventEntry) -> None:  # noqa: C901  # a case for each event
        """Change the run as the loop does before an event."""
        run, data = self.run, entry.data
        if entry.event in SERVED:
            run.control.pop_request(SERVED[entry.event])
        match entry.event:
            case "train_start":
                run.started = True
                h.Filter.plan_all(run)
            case "checkpoint_loaded":
                self._load(data)
            case "epoch_start":
                run.batches_per_epoch = data["batches"]
            case "epoch_end":
                self._flush(entry.counters)
                run.control.close_epoch()
                run.window = 0
            case "last_boundary":
                self._end_training(entry.counters)
            case "change_served":
                run.control.pop_changes()
            case "validation_start" | "test_start" | "predict_start":
                run.control.is_evaluating = True
                run.phase, run.data.evaluation_batches = PHASES[entry.event], data["batches"]
            case "validation_end" | "test_end" | "predict_end" | "validation_cut":
                self._replay_evaluation(data["batches"])
                run.control.close_validation()
            case "checkpoint_saved":
                run.last = Path(data["path"])
                if data["is_best"]:
                    run.best = self._session.best = run.last
            case "run_failed":
                run.phase = data["phase"]

    def _continue(self, entry: EventEntry) -> None:
        """Continue as the loop does after an event."""
        run = self.run
        match entry.event:
            case "train_start" if self._entries.milestone() == "checkpoint_loaded":
                pass
            case "train_start" | "checkpoint_loaded":  # a boundary before the next epoch
                self._has_begun = True
                self._replay_boundary(always=run.in_boundary)
            case "epoch_start" if not entry.data["resumed"]:
                self._replay_boundary()
            case "epoch_end" | "last_boundary" | "train_end":
                self._replay_boundary(always=True)
            case "validation_end" | "test_end" | "predict_end" | "validation_cut":
                run.progress.validations += entry.event == "validation_end" and run.trains
                run.phase = self._attempt.phase

    def _emit(self, entry: EventEntry) -> None:
        event = make_event(entry)
        if event is None or entry.event in DURING_BATCHES:  # the events of the batch set the counters
            self.run.progress.set_seconds(entry.counters.seconds)
        else:
            self.run.move_to(entry.counters)
        if event is None:  # a custom event, whose class is unknown
            return
        while is_of_event(self._entries.peek(), event.name):
            self._replay(self._entries.next())
        self.run.emit(event)
        if isinstance(event, h.Log | h.ValidationEnd | h.TestEnd | h.PredictEnd):
            self.run.metrics.update(event.metrics)

    def _load(self, data: Mapping[str, Any]) -> None:
        run, session, path = self.run, self._session, data["path"]
        if rolls_back := self._has_begun:
            run.control.discard_epoch()
            run.window, run.loss = 0, None
            run.metrics.clear()
        run.start_from(Counters(**data["origin"]))
        run.in_boundary, run.planned_steps = data["in_boundary"], data["planned_steps"]
        h.Filter.plan_all(run)
        if not session.restore_snapshot(run, rolls_back=rolls_back):
            self._note(
                f"continued from {path or 'a state'}, whose save is not recorded: the replayed plugins continued "
                f"without a restored state"
            )
        run.last, run.best = None if path is None else Path(path), session.best

    def _end_training(self, place: Counters) -> None:
        self._flush(place)
        if self._attempt.status == "stopped" and not self.run.control.stopped:
            self._note(
                f"was stopped at epoch {place.epoch} batch {place.batch} step {place.steps}: with the replayed plugins "
                f"it would have continued, but the continuation is not recorded"
            )
        self.run.finished = True

    def _replay_evaluation(self, batches: dict[str, int]) -> None:
        """Replay the batches of an evaluation, given their number in each set, if they have handlers."""
        run = self.run
        batch_start: Any = KINDS[f"{run.phase}_batch_start"]
        batch_end: Any = KINDS[f"{run.phase}_batch_end"]
        before, after = run.bus.signal(batch_start), run.bus.signal(batch_end)
        datasets = [dataset for dataset, count in batches.items() for _ in range(count)]
        for run.progress.evaluated, dataset in enumerate(datasets if before.chain or after.chain else ()):
            before.emit(run, batch_start(dataset))
            run.progress.evaluated += 1
            after.emit(run, batch_end(dataset))

    def _note(self, text: str) -> None:
        self._session.note(f"attempt {self._session.number} {text}")

    # Batches, with the events of the loop that have handlers.

    def _open_block(self, block: Batches) -> None:
        """Replace a block by its batches, or by its last batch if nothing can happen in the others."""
        first, run = block.first, self.run
        if first.batches != run.progress.batches:  # the recorder was switched off for a while
            self._note(f"does not record every batch before epoch {first.epoch} batch {first.batch}")
            run.move_to(first)
        if not run.control.pending and not any(signal.chain for signal in self._signals.values()):
            block = slice_block(block, len(block) - 1, len(block))
            run.move_to(block.first)
        self._entries.insert(block)

    def _replay_batch(self, batch: Batch) -> None:
        run, progress, place = self.run, self.run.progress, batch.counters
        run.data.in_hand = True
        run.control.skips_batch = place.skipped_batches > progress.skipped_batches
        is_skipped = run.control.skips_batch  # a replayed plugin may request a skip
        self._fire(h.BatchStart)
        if is_skipped:
            progress.skipped_batches = place.skipped_batches
        else:
            progress.samples = place.samples
            run.loss = UNREAD if batch.loss is None else batch.loss
            self._fire(h.ForwardEnd)
            run.window += 1
            self._fire(h.BackwardEnd)
        progress.tokens = place.tokens
        self._step_to(place)
        run.window = batch.window
        progress.batch += 1
        run.data.in_hand = False
        progress.set_seconds(place.seconds)
        while is_during(self._entries.peek(), progress.batch):
            self._replay(self._entries.next())
        self._fire(h.BatchEnd)
        run.control.close_batch()
        self._replay_boundary(judged=bool(self._signals[h.ShouldStop].chain))

    def _flush(self, place: Counters) -> None:
        """Step with the gradients of a last, partial window, as the loop does."""
        if self.run.window and self._step_to(place):
            self.run.control.close_batch()
        self.run.loss = None

    def _step_to(self, place: Counters) -> bool:
        """Step, or skip the step, if the recorded run did so before a place; return whether it did."""
        progress = self.run.progress
        if (place.steps, place.skipped_steps) == (progress.steps, progress.skipped_steps):
            return False
        if self.run.is_named and (self._signals[h.GradientsReady].chain or self._signals[h.StepEnd].chain):
            raise ValueError(
                f"{self._session.recording.path} has several optimizers, and the order of their steps is not recorded. "
                f"Replay without the plugins that handle GradientsReady or StepEnd."
            )
        self.run.control.drops_step = place.skipped_steps > progress.skipped_steps
        self._fire(h.GradientsReady)
        progress.skipped_steps = place.skipped_steps
        if place.steps > progress.steps:
            progress.steps = place.steps
            self._fire(h.StepEnd)
        self.run.window = 0
        return True

    def _fire(self, kind: type[Event]) -> None:
        """Emit an event without an entry, after the recorded requests of other plugins."""
        self._requests.add_waiting(kind.name)
        signal = self._signals[kind]
        if signal.chain:
            signal.emit(self.run, kind())

    # Step boundaries.

    def _replay_boundary(self, *, always: bool = False, judged: bool = False) -> None:
        """Replay the entries up to the next milestone, which shows what the recorded run decided at this boundary.

        Args:
            always: whether the loop has a boundary here even without a request.
            judged: whether `ShouldStop` has handlers, and the loop emits it here even without a request.
        """
        run, entries, is_due = self.run, self._entries, always
        before = run.control.open_requests()
        while not entries.ends_boundary(run.progress.batch):
            entry = entries.next()
            is_due = is_due or (isinstance(entry, EventEntry) and entry.event in ("change_served", *SERVED))
            self._replay(entry)
        milestone = entries.milestone()
        if milestone != "run_failed" and (is_due or run.control.is_due(window=run.window, judged=judged)):
            self._close_boundary(before, milestone)

    def _close_boundary(self, before: Mapping[str, Request], milestone: str) -> None:
        """Drop the requests that the recorded run did not serve, emit `ShouldStop`, and decide.

        Args:
            before: the open requests at the beginning of the boundary.
            milestone: what the recorded run did next; empty if it was killed.
        """
        run, control = self.run, self.run.control
        if not milestone:  # whether the stop was postponed is unknown
            if not run.finished:
                self._add_end(did=None)
            return
        control.pop_changes()
        for what, request in control.open_requests().items():
            if before.get(what) is request:
                control.pop_request(request.verb)
        if run.finished:
            return
        control.release()
        self._fire(h.ShouldStop)
        continued = milestone in CONTINUES and not (milestone == "epoch_start" and run.epoch_is_over)
        if control.vetoed or control.is_rolling_back:
            pass
        elif milestone == "last_boundary":
            self._add_end(did=True)
        elif continued and self._requests.has_veto:  # repeated vetoes are only counted
            control.adopt(control.open_requests(), vetoed=True)
        elif continued:
            self._add_end(did=False)
            control.stop_request = None
        if milestone == BATCHES:  # the recorded run did not end the epoch
            control.close_epoch()
        control.decide(in_epoch=milestone == BATCHES or run.progress.batch > 0)

    def _add_end(self, *, did: bool | None) -> None:
        """Note that a requested stop would have ended the run."""
        stop = self.run.control.stop_request
        if stop is not None:
            self._session.add_end(stop.by, stop.reason, self.run.progress, did=did)
