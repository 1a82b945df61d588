"""The requests of plugins that are not replayed: each is added to the control where it was made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

from heliograph.events import Request

from ..format.records import AttemptRecord, RepeatEntry, RequestEntry
from ..verbs import EVALUATION_VERB, VERBS
from .entries import Entries
from .run import ReplayRun

BATCH_EVENTS: Final = ("batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end")
_ORDER: Final = {event: place for place, event in enumerate(("batch_start", "", *BATCH_EVENTS[1:]))}
BATCH_VERBS: Final = [verb for verb, facts in VERBS.items() if facts.about in ("batch", "step")]


class RecordedRequests:
    """The recorded requests; those of replayed plugins are left out, since these make their own.

    Args:
        attempt: the replayed attempt.
        entries: its entries.
        run: the run.
        replayed: the names of the replayed plugins.

    Attributes:
        waiting: the requests about later batches, by the batch's epoch and number.
        cut: the last request to cut a validation short.
        has_stop: whether a stop was requested in the recorded run.
        has_veto: whether a plugin that is not replayed postponed a stop.
    """

    def __init__(self, attempt: AttemptRecord, entries: Entries, run: ReplayRun, replayed: Collection[str]) -> None:
        self.waiting: defaultdict[tuple[int, int], list[RequestEntry]] = defaultdict(list)
        self.cut: Request | None = None
        self.has_stop = self.has_veto = False
        self._plan, self._entries, self._run, self._replayed = attempt.plan, entries, run, replayed
        self._control = run.own_control
        self._votes: list[RequestEntry] = []
        self._done: set[int] = set()
        self._added: dict[int, Request] = {}
        made = (entry.request for entry in attempt.entries if isinstance(entry, RequestEntry))
        self._made = {_place_of(request) for request in made}

    def was_made(self, request: Request) -> bool:
        return _place_of(request) in self._made

    def read(self, asked: RequestEntry) -> None:
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
            self._add(asked)

    def update_count(self, recounted: RepeatEntry) -> None:
        if recounted.number in self._added:
            self._added[recounted.number].times = recounted.times

    def add_before(self, event: str) -> None:
        for asked in self._entries.following_requests():
            if asked.request.event == event and asked.number not in self._done:
                if self._is_later(asked.request):
                    return  # added when its entry is read, after the event
                self._add(asked)

    def collect(self) -> None:
        for asked in self._entries.following_requests():
            if _is_of_batch(asked.request) and asked.number not in self._done:
                self.waiting[_batch_of(asked.request)].append(asked)
                self._done.add(asked.number)

    def add_before_in_batch(self, batch: int, event: str) -> None:
        key = self._run.progress.epoch, batch
        waiting = self.waiting.pop(key, [])
        while waiting and _ORDER[waiting[0].request.event] <= _ORDER[event]:
            if waiting[0].request.event == event and self._is_later(waiting[0].request):
                break
            self._add(waiting.pop(0))
        if waiting:
            self.waiting[key] = waiting

    def add_of_finished_batches(self) -> None:
        progress = self._run.progress
        for key in sorted(each for each in self.waiting if each <= (progress.epoch, progress.batch)):
            for asked in self.waiting.pop(key):
                self._add(asked)

    def add_votes(self) -> None:
        votes, self._votes = self._votes, []
        for asked in votes:
            self._add(asked)

    def _is_later(self, request: Request) -> bool:
        plan = self._plan.get(request.event, ())
        first = next((index for index, name in enumerate(plan) if name in self._replayed), len(plan))
        return request.by in self._replayed or request.by in plan[first:]

    def _add(self, asked: RequestEntry) -> None:
        self._done.add(asked.number)
        request = asked.request
        self.has_stop = self.has_stop or request.verb == "stop"
        if request.verb == EVALUATION_VERB:
            self.cut = request
        if request.by not in self._replayed:
            self.has_veto = self.has_veto or request.verb == "veto_stop"
            self._added[asked.number] = self._control.add_recorded(request)


def _place_of(request: Request) -> tuple[Any, ...]:
    return request.verb, request.by, request.epoch, request.batch, request.step


def _is_of_batch(request: Request) -> bool:
    return request.event in BATCH_EVENTS or (not request.event and request.verb in BATCH_VERBS)


def _batch_of(request: Request) -> tuple[int, int]:
    return request.epoch, request.batch + (request.event != "batch_end")
