"""The failure of a recorded run: its last batch, and the handlers that were called before the error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from heliograph import BackwardEnd, BatchStart, Bus, ForwardEnd, GradientsReady, StepEnd
from heliograph.events import Event, Receiver

from ..format.records import AttemptRecord, Entry, EventEntry
from .entries import Entries
from .requests import BATCH_EVENTS, RecordedRequests
from .run import LOSSES, ReplayRun
from .stubs import UnrecordedAttribute

AFTER_BOUNDARY: Final = (None, *BATCH_EVENTS[:-1])  # in the loader, the task or a batch
UNKNOWN_LOSS = UnrecordedAttribute("the loss of the batch at which the run failed", LOSSES)


class RecordedFailure:
    """The failure of the recorded run, if it is at the current entry."""

    def __init__(self, attempt: AttemptRecord, bus: Bus, entries: Entries) -> None:
        self._plan, self._bus, self._entries = attempt.plan, bus, entries

    def is_by(self, plugin: str, event: str) -> bool:
        failure = self._entries.failure()
        return self.is_on(event) and failure is not None and failure.data["plugin"] == plugin

    def is_on(self, event: str) -> bool:
        failure = self._entries.failure()
        return failure is not None and failure.data["event"] == event

    @staticmethod
    def interrupts_boundary(following: Entry) -> bool:
        """Return whether the recorded run fails before `ShouldStop`, so that the boundary decides nothing."""
        if not isinstance(following, EventEntry) or following.event != "run_failed":
            return False
        return following.data["phase"] != "train" or following.data["event"] not in (*AFTER_BOUNDARY, "should_stop")

    @contextmanager
    def limit_handlers(self, kind: type[Event]) -> Iterator[None]:
        """Omit the handlers that the recorded run did not call because a previous handler of the event failed."""
        failure = self._entries.failure()
        if failure is None or failure.data["event"] != kind.name:
            yield
            return
        plan, plugin = self._plan.get(kind.name, ()), failure.data["plugin"]
        end = plan.index(plugin) + 1 if plugin in plan else len(plan)
        omitted = set(plan[end:]) - set(plan[:end])

        def called(receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
            return (receiver for receiver in receivers if owners[id(receiver)] not in omitted)

        signal = self._bus.signal(kind)
        previous, signal.probe = signal.probe, called
        try:
            yield
        finally:
            signal.probe = previous

    def replay_last_batch(self, failure: EventEntry, run: ReplayRun, requests: RecordedRequests) -> None:
        """Replay the completed part of the batch in which the run failed, if it failed in one."""
        if not failure.data["in_hand"]:
            return
        run.data.in_hand, run.is_last_seen = True, failure.data["is_last"]
        self._emit(run, requests, BatchStart())
        if failure.counters.skipped_batches > run.progress.skipped_batches:
            run.progress.skipped_batches = failure.counters.skipped_batches
            if run.stepping.window:
                self._close_window(failure, run, requests)
        elif failure.counters.samples > run.progress.samples:
            loss = failure.data["loss"]
            run.progress.samples, run.loss = failure.counters.samples, UNKNOWN_LOSS if loss is None else loss
            self._emit(run, requests, ForwardEnd())
            if failure.data["window"] > run.stepping.window or failure.data["event"] == StepEnd.name:
                run.stepping.window += 1
                self._emit(run, requests, BackwardEnd())
                if not self.is_on(BackwardEnd.name):
                    self._close_window(failure, run, requests)

    def _close_window(self, failure: EventEntry, run: ReplayRun, requests: RecordedRequests) -> None:
        if run.own_control.is_held and not run.data.is_last_batch:
            return
        run.progress.tokens = failure.counters.tokens
        self._emit(run, requests, GradientsReady())
        if failure.counters.steps > run.progress.steps:
            run.progress.steps = failure.counters.steps
            self._emit(run, requests, StepEnd())

    def _emit(self, run: ReplayRun, requests: RecordedRequests, event: Event) -> None:
        requests.add_before_in_batch(run.progress.batch + 1, event.name)
        with self.limit_handlers(type(event)):
            run.emit(event)
