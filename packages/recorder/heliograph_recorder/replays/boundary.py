"""A step boundary: which requests the recorded run served there, and whether the run would have ended."""

from __future__ import annotations

from typing import Final

from heliograph import Request, ShouldStop
from heliograph.events import Verb

from ..format.records import Entry, EventEntry
from ..verbs import TAKEN_BACK
from .entries import BATCHES, ENDS
from .failure import RecordedFailure
from .findings import Findings
from .requests import RecordedRequests
from .run import ReplayRun

SERVED: Final[tuple[Verb, ...]] = ("next_phase", "log", "validation", "save")  # in the order of the loop
CONTINUES: Final = (BATCHES, "epoch_start", "checkpoint_loaded")


class Boundary:
    """The boundary that the replay is at, if it is at one.

    Args:
        run: the run.
        requests: those of plugins that are not replayed.
        findings: where to note which requests were served.
        failure: how the run failed, if it did.
        is_shared: whether several ranks were recorded: what only one of them asked for, they serve a boundary later.
    """

    def __init__(
        self,
        run: ReplayRun,
        requests: RecordedRequests,
        findings: Findings,
        failure: RecordedFailure,
        *,
        is_shared: bool,
    ) -> None:
        self._run, self._requests, self._findings, self._failure = run, requests, findings, failure
        self._should_stop = run.bus.signal(ShouldStop)
        self._is_shared = is_shared
        self._is_open = self._is_due = self._is_last = self._in_epoch = self._is_waiting = False
        self._served = -1  # the index of the last verb that was served or removed

    def open(self, *, due: bool, last: bool = False, in_epoch: bool = False) -> None:
        self._is_open, self._is_due, self._is_last, self._in_epoch, self._served = True, due, last, in_epoch, -1

    def serve(self, verb: Verb) -> None:
        if self._is_open:
            index = SERVED.index(verb)
            if index <= self._served:  # after the training everything is served twice
                self._remove_until(len(SERVED))
                self._served = -1
            self._remove_until(index)
            self._served, self._is_due = index, True
        self._run.control.pop_request(verb)
        self._findings.decide(verb, did=True)
        for taker, taken in TAKEN_BACK.items():
            if taken == verb:
                self._findings.decide(taker, did=False)

    def serve_change(self, change: Request) -> None:
        self._is_due = True
        self._run.own_control.remove(change.what)
        self._findings.decide_change(change, did=True)

    def close(self, following: Entry | None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if following is None:
            self._note_stop_where_killed()
            return
        if not self._is_due or self._failure.interrupts_boundary(following):
            return
        name = following.event if isinstance(following, EventEntry) else BATCHES
        was_waiting, self._is_waiting = self._is_waiting, False
        if name == BATCHES and not was_waiting and self._waits():
            self._is_waiting = True
            self._give_last_word()
            self._run.own_control.adopt(self._run.own_control.open_requests(), vetoed=False)
            return
        self._remove_until(len(SERVED))
        for taker, taken in TAKEN_BACK.items():  # what they took back was not served
            is_done = {"stop": name not in ENDS, "end_epoch": name == BATCHES or None}.get(taken, True)
            self._findings.decide(taker, did=is_done)
        if not self._is_last:
            self._run.control.release()
            self._give_last_word()
            self._decide(name)

    def _waits(self) -> bool:
        if not self._is_shared or not self._in_epoch or self._served >= 0:
            return False
        asked = self._run.own_control.open_requests().values()
        return bool(asked) and all(map(self._requests.was_made, asked))

    def _give_last_word(self) -> None:
        self._requests.add_votes()
        if self._should_stop.chain:
            with self._failure.limit_handlers(ShouldStop):
                self._should_stop.emit(self._run, ShouldStop())

    def _remove_until(self, end: int) -> None:
        for change in self._run.own_control.pop_changes():
            self._findings.decide_change(change, did=False)
        for verb in SERVED[self._served + 1 : end]:
            self._run.own_control.remove(verb)
            self._findings.decide(verb, did=None if verb == "next_phase" else False)

    def _decide(self, following: str) -> None:
        control = self._run.own_control
        stop = control.stop_request
        if stop is not None and not control.vetoed and not control.is_rolling_back:
            self._stop(stop, following)
        if following == BATCHES and control.should_end_epoch:
            control.remove("end_epoch")
            self._findings.decide("end_epoch", did=False)
        self._findings.decide("veto_stop", did=following not in ENDS)
        is_between_epochs = following == "epoch_start" and not self._run.progress.batch
        if is_between_epochs:
            self._findings.decide("end_epoch", did=None)
        control.decide(in_epoch=not is_between_epochs)

    def _stop(self, stop: Request, following: str) -> None:
        requests = self._requests
        if following == "epoch_start" and self._run.epoch_is_over:  # EpochEnd comes first, and has a boundary
            return
        if following in CONTINUES and requests.has_stop and requests.has_veto:
            self._run.own_control.postpone_stop()
            return
        if following in (*CONTINUES, *ENDS):
            self._add_end(stop, did=following in ENDS)
        if following in CONTINUES:
            self._run.own_control.remove("stop")

    def _note_stop_where_killed(self) -> None:
        stop = self._run.control.stop_request
        if stop is not None and not self._is_last:
            self._add_end(stop, did=None)

    def _add_end(self, stop: Request, *, did: bool | None) -> None:
        progress = self._run.progress
        where = progress.epoch, progress.batch, progress.steps
        self._findings.add_end(stop.by, stop.reason, where, did=did, failure=False)
        self._findings.decide("stop", did=did)
