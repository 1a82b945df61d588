"""The requests of plugins of the recorded run that are not replayed: they go into the control at their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from ....events import Request
from ..format.records import Attempt, RepeatEntry, RequestEntry
from .run import ReplayRun
from .script import Script

BATCH_EVENTS: Final = ("batch_start", "gradients_ready", "step_end", "batch_end")
_ORDER: Final = {"batch_start": 0, "": 1, "gradients_ready": 2, "step_end": 3, "batch_end": 4}
BATCH_VERBS: Final = ("skip_batch", "hold_step", "scale_loss", "skip_step")


class Requests:
    """Puts them into the control; those of plugins that are replayed are left out, since these ask themselves.

    Args:
        attempt: what is replayed.
        script: its entries.
        run: the run.
        replayed: the names of the replayed plugins.

    Attributes:
        waiting: those about a batch that is to come, by its epoch and number.
        cut: the last request to cut a validation short.
        has_stop: whether a stop was asked for in the recorded run.
        has_veto: whether somebody who is not replayed put a stop off.
    """

    def __init__(self, attempt: Attempt, script: Script, run: ReplayRun, replayed: Collection[str]) -> None:
        self.waiting: defaultdict[tuple[int, int], list[RequestEntry]] = defaultdict(list)
        self.cut: Request | None = None
        self.has_stop = self.has_veto = False
        self._plan, self._script, self._run, self._replayed = attempt.plan, script, run, replayed
        self._control = run.own_control
        self._votes: list[RequestEntry] = []
        self._done: set[int] = set()
        self._put: dict[int, Request] = {}

    def meet(self, asked: RequestEntry) -> None:
        """Take a request where it stands in the recording: now, or later, if it belongs to what comes."""
        request, progress = asked.request, self._run.progress
        if asked.number in self._done:
            return
        if request.event == "should_stop":
            self._votes.append(asked)
            self._done.add(asked.number)
        elif _is_of_batch(request) and (progress.epoch, progress.batch) < (key := _batch_of(request)):
            self.waiting[key].append(asked)
            self._done.add(asked.number)
        else:
            self._take(asked)

    def count(self, recounted: RepeatEntry) -> None:
        """Take note that a request was made again."""
        if recounted.number in self._put:
            self._put[recounted.number].times = recounted.times

    def bring(self, event: str) -> None:
        """Put what was asked during an event that is now told, before the replayed plugins hear of it."""
        for asked in self._script.directly_behind():
            if asked.request.event == event and asked.number not in self._done:
                if self._is_late(asked.request):
                    return  # it comes when the event is over
                self._take(asked)

    def gather(self) -> None:
        """Look for what was asked during the batches of this block."""
        for asked in self._script.directly_behind():
            if _is_of_batch(asked.request) and asked.number not in self._done:
                self.waiting[_batch_of(asked.request)].append(asked)
                self._done.add(asked.number)

    def bring_of_batch(self, epoch: int, batch: int, event: str) -> None:
        """Put what was asked before an event of a batch, given by its number behind it; then as for other events."""
        asked = self.waiting.pop((epoch, batch), [])
        while asked and _ORDER[asked[0].request.event] <= _ORDER[event]:
            if asked[0].request.event == event and self._is_late(asked[0].request):
                break
            self._take(asked.pop(0))
        if asked:
            self.waiting[epoch, batch] = asked

    def bring_past(self) -> None:
        """Put what was asked during batches that are done."""
        place = self._run.progress
        for key in sorted(each for each in self.waiting if each <= (place.epoch, place.batch)):
            for asked in self.waiting.pop(key):
                self._take(asked)

    def bring_votes(self) -> None:
        """Put what was asked as the last word at a boundary."""
        votes, self._votes = self._votes, []
        for asked in votes:
            self._take(asked)

    def _is_late(self, request: Request) -> bool:
        """Return whether a request was made behind the first replayed plugin, or by it."""
        plan = self._plan.get(request.event, ())
        first = next((index for index, name in enumerate(plan) if name in self._replayed), len(plan))
        return request.by in self._replayed or request.by in plan[first:]

    def _take(self, asked: RequestEntry) -> None:
        self._done.add(asked.number)
        request = asked.request
        self.has_stop = self.has_stop or request.verb == "stop"
        if request.verb == "cut_validation":
            self.cut = request
        if request.by not in self._replayed:
            self.has_veto = self.has_veto or request.verb == "veto_stop"
            self._put[asked.number] = self._control.put(request)


def _is_of_batch(request: Request) -> bool:
    return request.event in BATCH_EVENTS or (not request.event and request.verb in BATCH_VERBS)


def _batch_of(request: Request) -> tuple[int, int]:
    """Return the epoch and the number behind it of the batch about which something was asked."""
    return request.epoch, request.batch + (request.event != "batch_end")
