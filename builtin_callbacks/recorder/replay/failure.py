"""A run that failed: who still heard of the event at which it did, and what of its last batch had come about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ....core.loop import BATCH_START, GRADIENTS_READY, STEP_END
from ....events import Bus, Event, StepEnd
from ....events.bus import Receiver
from ..format.records import Attempt, Entry, EventEntry
from .requests import Requests
from .run import LOSSES, ReplayRun
from .script import Script
from .stand_ins import Unheld

BEHIND = (None, "batch_start", "gradients_ready", "step_end")  # in the loader, the task or the next batch
UNKNOWN_LOSS = Unheld("the loss of the batch at which the run failed", LOSSES)


class Failing:
    """Knows of the failure that comes next.

    Args:
        attempt: what is replayed.
        bus: the replay's.
        script: the attempt's entries.
    """

    def __init__(self, attempt: Attempt, bus: Bus, script: Script) -> None:
        self._plan, self._bus, self._script = attempt.plan, bus, script

    def is_by(self, plugin: str, event: str) -> bool:
        """Return whether the recorded run fails here by the same plugin, on the same event."""
        failure = self._script.failure()
        return self.is_on(event) and failure is not None and failure.data["plugin"] == plugin

    def is_on(self, event: str) -> bool:
        """Return whether the recorded run fails here, on this event."""
        failure = self._script.failure()
        return failure is not None and failure.data["event"] == event

    @staticmethod
    def cuts_boundary(following: Entry) -> bool:
        """Return whether the recorded run fails before the last word at a boundary, so that nothing is decided."""
        if not isinstance(following, EventEntry) or following.event != "run_failed":
            return False
        return following.data["phase"] != "train" or following.data["event"] not in (*BEHIND, "should_stop")

    @contextmanager
    def heard(self, kind: type[Event]) -> Iterator[None]:
        """Where the run failed on this event, let those hear it who did before, and who was not there."""
        failure = self._script.failure()
        if failure is None or failure.data["event"] != kind.name:
            yield
            return
        plan, plugin = self._plan.get(kind.name, ()), failure.data["plugin"]
        end = plan.index(plugin) + 1 if plugin in plan else len(plan)
        late = set(plan[end:]) - set(plan[:end])

        def early(receivers: Iterator[Receiver], owners: Mapping[int, str]) -> Iterator[Receiver]:
            return (receiver for receiver in receivers if owners[id(receiver)] not in late)

        signal = self._bus.signal(kind)
        signal.probe = early
        try:
            yield
        finally:
            signal.probe = None

    def replay_last_batch(self, failure: EventEntry, run: ReplayRun, requests: Requests) -> None:
        """Replay what came about of the batch that was in hand when the run failed."""
        if not failure.data["in_hand"]:
            return
        run.in_hand, run.last_seen = True, failure.data["is_last"]
        self._emit(run, requests, BATCH_START)
        if failure.counters.skipped_batches > run.progress.skipped_batches:
            run.progress.skipped_batches = failure.counters.skipped_batches
            if run.window:
                self._end_window(failure, run, requests)
        elif failure.counters.samples > run.progress.samples:
            loss = failure.data["loss"]
            run.progress.samples, run.loss = failure.counters.samples, UNKNOWN_LOSS if loss is None else loss
            if failure.data["window"] > run.window or failure.data["event"] == StepEnd.name:
                run.window += 1
                self._end_window(failure, run, requests)

    def _end_window(self, failure: EventEntry, run: ReplayRun, requests: Requests) -> None:
        if run.own_control.is_held and not run.is_last_batch:
            return
        self._emit(run, requests, GRADIENTS_READY)
        if failure.counters.steps > run.progress.steps:
            run.progress.steps = failure.counters.steps
            self._emit(run, requests, STEP_END)

    def _emit(self, run: ReplayRun, requests: Requests, event: Event) -> None:
        requests.bring_of_batch(run.progress.epoch, run.progress.batch + 1, event.name)
        with self.heard(type(event)):
            run.emit(event)
