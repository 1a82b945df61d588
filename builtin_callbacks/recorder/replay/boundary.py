"""A step boundary: what was granted there, what was not, and whether the run would have ended."""

from __future__ import annotations

from typing import Final

from ....core.loop import SHOULD_STOP
from ....events import Request
from ....events.catalogue import ShouldStop
from ....events.control import Verb
from ..format.records import Entry, EventEntry
from .failure import Failing
from .ledger import Ledger
from .requests import Requests
from .run import ReplayRun
from .script import BATCHES

SERVED: Final[tuple[Verb, ...]] = ("next_phase", "log", "validation", "save")
GOING_ON = (BATCHES, "epoch_start", "checkpoint_loaded")


class Boundary:
    """The boundary at which the replay stands, if it does.

    Args:
        run: the run.
        requests: those of the other plugins.
        ledger: where to write down what comes of the requests.
        failing: how the run failed, if it did.
    """

    def __init__(self, run: ReplayRun, requests: Requests, ledger: Ledger, failing: Failing) -> None:
        self._run, self._requests, self._ledger, self._failing = run, requests, ledger, failing
        self._should_stop = run.bus.signal(ShouldStop)
        self._is_open = self._is_due = self._is_last = False
        self._passed = -1

    def open(self, *, due: bool, last: bool = False) -> None:
        """Stand at a boundary.

        Args:
            due: whether the loop is there, even if the recording shows nothing that was granted.
            last: whether it is the one behind `TrainEnd`.
        """
        self._is_open, self._is_due, self._is_last, self._passed = True, due, last, -1

    def serve(self, verb: Verb) -> None:
        """Note that the recorded run granted something; what comes before it in a boundary was not granted."""
        if self._is_open:
            index = SERVED.index(verb)
            if index <= self._passed:  # behind `TrainEnd` everything is served twice
                self._pass(len(SERVED))
                self._passed = -1
            self._pass(index)
            self._passed, self._is_due = index, True
        self._run.control.pop_request(verb)
        self._ledger.settle(verb, did=True)

    def close(self, following: Entry | None) -> None:
        """Leave the boundary, if the replay stands at one.

        Args:
            following: with what the recorded run went on or ended; None where it was killed here.
        """
        if not self._is_open:
            return
        self._is_open = False
        if following is None:
            self._stop_where_killed()
            return
        if not self._is_due or self._failing.cuts_boundary(following):
            return
        self._pass(len(SERVED))
        if not self._is_last:
            self._run.control.release()
            self._requests.bring_votes()
            if self._should_stop.chain:
                with self._failing.heard(ShouldStop):
                    self._should_stop.emit(self._run, SHOULD_STOP)
            self._decide(following.event if isinstance(following, EventEntry) else BATCHES)

    def _pass(self, end: int) -> None:
        """Take out what was not granted, of what would have been by now."""
        for verb in SERVED[self._passed + 1 : end]:
            self._run.own_control.drop(verb)
            self._ledger.settle(verb, did=None if verb == "next_phase" else False)

    def _decide(self, following: str) -> None:
        control = self._run.own_control
        stop = control.stop_request
        if stop is not None and not control.vetoed and not control.is_rolling_back:
            self._stop(stop, following)
        if following == BATCHES and control.should_end_epoch:
            control.drop("end_epoch")
            self._ledger.settle("end_epoch", did=False)
        self._ledger.settle("veto_stop", did=following != "train_end")
        control.decide()

    def _stop(self, stop: Request, following: str) -> None:
        """Note that the run would have ended here, unless somebody put that off who is not replayed."""
        requests = self._requests
        if following == "epoch_start" and self._run.epoch_is_over:  # that is told yet, and decided upon behind it
            return
        if following in GOING_ON and requests.has_stop and requests.has_veto:
            self._run.own_control.hold_out()
            return
        if following in (*GOING_ON, "train_end"):
            self._end(stop, did=following == "train_end")
        if following in GOING_ON:
            self._run.own_control.drop("stop")

    def _stop_where_killed(self) -> None:
        """Note a stop that stands where the run was killed; whether anybody put it off, nobody knows."""
        stop = self._run.control.stop_request
        if stop is not None and not self._is_last:
            self._end(stop, did=None)

    def _end(self, stop: Request, *, did: bool | None) -> None:
        place = self._run.progress
        self._ledger.end(stop.by, stop.reason, (place.epoch, place.batch, place.steps), did=did, failure=False)
        self._ledger.settle("stop", did=did)
