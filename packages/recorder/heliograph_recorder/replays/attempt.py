"""Replay one attempt entry by entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import heliograph as h
from heliograph.events import Event, OrderedSignal, Phase, Request, Verb

from ..format.records import (
    COLUMNS,
    AttemptRecord,
    Batches,
    Counters,
    Entry,
    EventEntry,
    RepeatEntry,
    RequestEntry,
    change_of,
)
from ..verbs import LOADED, SERVED
from .entries import BATCHES, ENDS, KINDS, MILESTONES, Entries, RecordedRequests, make_event
from .run import UNREAD, ReplayRun

if TYPE_CHECKING:
    from .replay import ReplaySession

# The events that may be emitted during a batch.
DURING_BATCHES: Final = (
    "plugin_changed", "plugin_failed", "checkpoint_saved", "checkpoint_pruned", "resume_verified", "verdict",
    "late_result",
)  # fmt: skip
AT_BOUNDARIES: Final[tuple[Verb, ...]] = ("next_phase", "log", "validation", "save")  # in the order of the loop
CONTINUES: Final = (BATCHES, "epoch_start", "checkpoint_loaded")
HOT = h.BatchStart, h.ForwardEnd, h.BackwardEnd, h.GradientsReady, h.StepEnd, h.BatchEnd, h.ShouldStop
EVALUATIONS: Final[tuple[Phase, ...]] = "validation", "test", "predict"


class AttemptReplay:
    """Replay one attempt.

    It does not run `core.loop`: the recording decides what happens, regardless of the requests of replayed plugins.
    After a kill or in a damaged file, entries are missing, and the remaining ones are not a path through the loop.

    At the step boundary after a batch, an epoch or the training, the next milestone shows which requests the recorded
    run served, and whether it ended.

    Args:
        session: the replay.
        attempt: the recorded attempt.

    Attributes:
        run: the run that the plugins receive.
    """

    def __init__(self, session: ReplaySession, attempt: AttemptRecord) -> None:
        self._session, self._attempt = session, attempt
        self._entries = entries = Entries(attempt)
        self.run = ReplayRun(attempt, session.recording.path, session.bus, session.add_request, entries.rolls_back_to)
        self._requests = RecordedRequests(attempt, self.run, session.names)
        self._signals: dict[type[Event], OrderedSignal[Any]] = {kind: session.bus.signal(kind) for kind in HOT}
        self._has_begun = False  # after the load of a resumed state
        # The boundary at the current position: whether the loop has one there even without a served request, whether
        # the training is over, and the index of the last verb that was served or removed.
        self._is_open = self._is_due = self._is_last = False
        self._served = -1

    def replay(self, length: int | None) -> None:
        """Replay all entries; `length` is the epoch's length in the previous attempt, in case this one has no epoch."""
        self.run.batches_per_epoch = self._entries.next_epoch_length(length)
        while (entry := self._entries.next()) is not None:
            self._replay(entry)
        self._close_boundary(None)

    @property
    def fails_next(self) -> bool:
        """True if the recorded run failed at the current position."""
        return self._entries.next_milestone_name() == "run_failed"

    def save(self) -> None:
        """During a `SavePoint`, take a snapshot, and replay the entries of the save."""
        session = self._session
        while session.unwritten and (entry := self._entries.next_of_save()) is not None:
            self._replay(entry)  # the end of a save in the background
        session.take_snapshot(self.run)
        while (entry := self._entries.next_of_save()) is not None:
            self._replay(entry)

    def _replay(self, entry: Entry) -> None:
        match entry:
            case EventEntry():
                self._replay_event(entry)
            case Batches():
                self._close_boundary(entry)
                self._check_gap(entry.first)
                self._replay_block(entry)
            case RequestEntry() | RepeatEntry():
                self._requests.read(entry)

    def _replay_event(self, entry: EventEntry) -> None:  # noqa: C901  # a case for each event
        run, data = self.run, entry.data
        if entry.event in MILESTONES:
            self._close_boundary(entry)
            if entry.event != "checkpoint_loaded":
                self._check_gap(entry.counters)
        elif entry.data.get("by") == LOADED:  # of a state whose load is the next milestone
            self._close_boundary(self._entries.next_milestone())
        if entry.event in ("log", "validation_start", "save_point"):
            self._serve(SERVED[entry.event])
        match entry.event:
            case "train_start":
                run.started = True
                h.Filter.plan_all(run)
                self._emit(entry)
                if self._entries.next_milestone_name() != "checkpoint_loaded":
                    self._begin()
            case "checkpoint_loaded":
                self._load(entry)
            case "epoch_start":
                run.batches_per_epoch = data["batches"]
                self._emit(entry)
                if not data["resumed"]:
                    self._open_boundary(due=run.control.pending)
            case "epoch_end":
                self._end_epoch(entry)
            case "last_boundary" | "train_end":
                self._end_training(entry)
            case "change_served":
                self._is_due = True
                run.own_control.remove(change_of(data).what)
                self._emit(entry)
            case "validation_start" | "test_start" | "predict_start":
                run.phase = _phase_of(entry.event)
                run.data.evaluation_batches = data["batches"]
                run.control.is_evaluating = True
                self._emit(entry)
            case "validation_end" | "test_end" | "predict_end" | "validation_cut":
                self._end_evaluation(entry)
            case "checkpoint_saved":
                run.last = Path(data["path"])
                if data["is_best"]:
                    run.best = self._session.best = run.last
                self._session.unwritten = max(0, self._session.unwritten - 1)
                self._emit(entry)
            case "plugin_changed" if data["plugin"] in self._session.names:
                run.progress.set_seconds(entry.counters.seconds)
                off = data["change"] in ("disabled", "unregistered")
                self._session.switches.switch(data["plugin"], "disabled", off=off)
            case "run_failed":
                run.phase = data["phase"]
                self._emit(entry)
            case _:
                self._emit(entry)

    def _emit(self, entry: EventEntry) -> None:
        event = make_event(entry)
        if event is None or entry.event in DURING_BATCHES:  # the events of the batch set the counters
            self.run.progress.set_seconds(entry.counters.seconds)
        else:
            self.run.move_to(entry.counters)
        if event is None:  # a custom event, whose class is unknown
            return
        while (following := self._entries.peek()) is not None and self._requests.is_before(following, event.name):
            self._entries.next()
            self._replay(following)
        self.run.emit(event)
        if isinstance(event, h.Log | h.ValidationEnd | h.TestEnd | h.PredictEnd):
            self.run.metrics.update(event.metrics)

    def _begin(self) -> None:
        """Begin or continue, with a boundary before the next epoch."""
        self._has_begun = True
        self._open_boundary(due=self.run.in_boundary or self.run.control.pending)

    def _load(self, entry: EventEntry) -> None:
        run, session, path = self.run, self._session, entry.data["path"]
        self._requests.loads += 1
        if rolls_back := self._has_begun:
            run.control.discard_epoch()
            run.window, run.loss, run.is_last_seen = 0, None, False
            run.metrics.clear()
        run.start_from(Counters(**entry.data["origin"]))
        run.in_boundary = entry.data["in_boundary"]
        run.planned_steps = entry.data["planned_steps"]
        h.Filter.plan_all(run)
        if not session.restore_snapshot(run, rolls_back=rolls_back):
            self._note(
                f"continued from {path or 'a state'}, whose save is not recorded: the replayed plugins continued "
                f"without a restored state"
            )
        run.last = None if path is None else Path(path)
        run.best = session.best
        self._emit(entry)
        self._begin()

    def _flush(self, place: Counters) -> None:
        """Step with the gradients of a last, partial window, as the loop does."""
        run = self.run
        if run.window and place.steps + place.skipped_steps > run.progress.steps + run.progress.skipped_steps:
            self._step(place.steps, place.skipped_steps)
            run.control.close_batch()
        run.loss = None

    def _end_epoch(self, entry: EventEntry) -> None:
        run = self.run
        self._flush(entry.counters)
        run.control.close_epoch()
        run.window, run.is_last_seen = 0, False
        run.batches_per_epoch = self._entries.next_epoch_length(run.batches_per_epoch)
        self._emit(entry)
        self._open_boundary(due=True)

    def _end_training(self, entry: EventEntry) -> None:
        place = entry.counters
        if not self.run.finished:
            self._flush(place)
            if self._attempt.status == "stopped" and not self.run.control.stopped:
                self._note(
                    f"was stopped at epoch {place.epoch} batch {place.batch} step {place.steps}: with the replayed "
                    f"plugins it would have continued, but the continuation is not recorded"
                )
            self.run.finished = True
            if entry.event != "last_boundary":
                self.run.emit(h.LastBoundary())
        self._emit(entry)
        self._open_boundary(due=True, last=True)

    def _check_gap(self, place: Counters) -> None:
        """Move to a place if batches before it are not recorded."""
        if place.batches != self.run.progress.batches:
            self._note(f"does not record every batch before epoch {place.epoch} batch {place.batch}")
            self.run.move_to(place)

    def _note(self, text: str) -> None:
        self._session.note(f"attempt {self._session.number} {text}")

    # Evaluations.

    def _end_evaluation(self, entry: EventEntry) -> None:
        """End an evaluation: only the recorded run cuts it short, not a replayed plugin."""
        run, control = self.run, self.run.control
        self._replay_evaluation(entry)
        if entry.event == "validation_cut":
            control.cut_request = cut = control.cut_request or self._requests.cut
            control.close_validation()
            self._emit(entry)
            if cut is not None and (run.finished or not run.started):
                control.stop_once(cut)
        else:
            control.cut_request = None
            control.close_validation()
            self._emit(entry)
            run.progress.validations += run.trains  # after the event, as in the loop
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
        datasets = [dataset for dataset, batches in entry.data["batches"].items() for _ in range(batches)]
        for run.progress.evaluated, dataset in enumerate(datasets if before.chain or after.chain else ()):
            before.emit(run, batch_start(dataset))
            run.progress.evaluated += 1
            after.emit(run, batch_end(dataset))
            if run.control.cut_request is not cut:  # a replayed plugin would have ended it here
                break
        run.control.is_evaluating = False

    # Batches, with the events of the loop that have handlers.

    def _replay_block(self, block: Batches) -> None:
        """Replay a block; the boundary after its last batch stays open."""
        run, control, entries = self.run, self.run.control, self._entries
        is_last = entries.ends_epoch()
        if not control.pending and not any(signal.chain for signal in self._signals.values()):
            self._move_to_end(block, is_last=is_last)
            return
        losses, entries.in_block = iter(block.losses or ()), True
        for number, row in enumerate(zip(*(getattr(block, name) for name in COLUMNS), strict=True), 1):
            if number == len(block):
                entries.in_block, run.is_last_seen = False, is_last
            self._replay_batch(row, next(losses, UNREAD))
            judged = bool(self._signals[h.ShouldStop].chain)
            self._open_boundary(due=control.is_due(window=run.window, judged=judged))
            if number < len(block):
                self._close_boundary(block)

    def _move_to_end(self, block: Batches, *, is_last: bool) -> None:
        run, losses = self.run, block.losses or (UNREAD,)
        run.move_to(block.last)
        run.window, run.is_last_seen, run.loss = block.window[-1], is_last, losses[-1]
        self._requests.add_until(run.progress.batch)
        run.control.close_batch()
        self._open_boundary(due=run.control.is_due(window=run.window, judged=False))

    def _replay_batch(self, row: tuple[int, ...], loss: Any) -> None:
        run, progress = self.run, self.run.progress
        centiseconds, steps, skipped_steps, skipped_batches, samples, window, tokens = row
        run.data.in_hand = True
        self._fire(h.BatchStart)
        if skipped_batches > progress.skipped_batches:
            progress.skipped_batches = skipped_batches
        else:
            progress.samples, run.loss = samples, loss
            self._fire(h.ForwardEnd)
            run.window += 1
            self._fire(h.BackwardEnd)
        progress.tokens = tokens
        if steps > progress.steps or skipped_steps > progress.skipped_steps:
            self._step(steps, skipped_steps)
        run.window = window
        progress.batch += 1
        run.data.in_hand = False
        progress.set_seconds(centiseconds / 100)
        self._fire(h.BatchEnd)
        self._requests.add_until(progress.batch)
        if run.control.touched:
            run.control.close_batch()

    def _step(self, steps: int, skipped_steps: int) -> None:
        progress = self.run.progress
        self._fire(h.GradientsReady)
        progress.skipped_steps = skipped_steps
        if steps > progress.steps:
            progress.steps = steps
            self._fire(h.StepEnd)
        self.run.window = 0

    def _fire(self, kind: type[Event]) -> None:
        """Emit an event of a batch, after the recorded requests before it."""
        self._requests.add_until(self.run.progress.batch + (kind is not h.BatchEnd), kind.name)
        signal = self._signals[kind]
        if signal.chain:
            signal.emit(self.run, kind())

    # Step boundaries.

    def _open_boundary(self, *, due: bool, last: bool = False) -> None:
        self._is_open, self._is_due, self._is_last, self._served = True, due, last, -1

    def _serve(self, verb: Verb) -> None:
        """Note that the recorded run served a request, but not the requests that precede it in a boundary."""
        if self._is_open:
            index = AT_BOUNDARIES.index(verb)
            if index <= self._served:  # after the training, everything is served twice
                self._remove_until(len(AT_BOUNDARIES))
                self._served = -1
            self._remove_until(index)
            self._served, self._is_due = index, True
        self.run.control.pop_request(verb)

    def _close_boundary(self, following: Entry | None) -> None:
        """End the boundary, if it is open; `following` is the next milestone, None if the run was killed."""
        if not self._is_open:
            return
        self._is_open = False
        control = self.run.own_control
        if following is None:
            if control.stop_request is not None and not self._is_last:  # whether it was postponed is unknown
                self._add_end(control.stop_request, did=None)
            return
        name = following.event if isinstance(following, EventEntry) else BATCHES
        if not self._is_due or name == "run_failed":
            return
        self._remove_until(len(AT_BOUNDARIES))
        if self._is_last:
            return
        control.release()
        self._requests.add_votes()
        if self._signals[h.ShouldStop].chain:
            self._signals[h.ShouldStop].emit(self.run, h.ShouldStop())
        if control.stop_request is not None and not control.vetoed and not control.is_rolling_back:
            self._stop(control.stop_request, name)
        if name == BATCHES and control.should_end_epoch:
            control.remove("end_epoch")
        control.decide(in_epoch=name == BATCHES or self.run.progress.batch > 0)

    def _remove_until(self, end: int) -> None:
        """Remove the requests that the recorded run did not serve."""
        self.run.own_control.pop_changes()
        for verb in AT_BOUNDARIES[self._served + 1 : end]:
            self.run.own_control.remove(verb)

    def _stop(self, stop: Request, following: str) -> None:
        """Note the end of the run, unless a plugin that is not replayed postponed the stop."""
        if following == "epoch_start" and self.run.epoch_is_over:  # the boundary of EpochEnd follows
            return
        if following in CONTINUES and self._requests.has_stop and self._requests.has_veto:
            self.run.own_control.postpone_stop()
            return
        if following in (*CONTINUES, *ENDS):
            self._add_end(stop, did=following in ENDS)
        if following in CONTINUES:
            self.run.own_control.remove("stop")

    def _add_end(self, stop: Request, *, did: bool | None) -> None:
        self._session.add_end(stop.by, stop.reason, self.run.progress, did=did)


def _phase_of(event: str) -> Phase:
    return next((phase for phase in EVALUATIONS if event.startswith(phase)), "validation")
