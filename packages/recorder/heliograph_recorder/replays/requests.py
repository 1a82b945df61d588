"""Add the requests of plugins that are not replayed to the control."""

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
    """The recorded requests, except those of replayed plugins.

    Args:
        attempt: the recorded attempt.
        entries: its entries.
        run: the replayed run.
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

    def read(self, entry: RequestEntry) -> None:
        """Add a request, or defer it if it is about a later batch or was made during `ShouldStop`."""
        request, progress = entry.request, self._run.progress
        if entry.number in self._done:
            return
        if request.event == "should_stop":
            self._votes.append(entry)
            self._done.add(entry.number)
        elif _is_of_batch(request) and (progress.epoch, progress.batch) < (key := _batch_of(request)):
            self.waiting[key].append(entry)
            self._done.add(entry.number)
        else:
            self._add(entry)

    def update_count(self, entry: RepeatEntry) -> None:
        if entry.number in self._added:
            self._added[entry.number].times = entry.times

    def add_before(self, event: str) -> None:
        """Add the requests made during an event before the first replayed plugin was called."""
        for entry in self._entries.following_requests():
            if entry.request.event == event and entry.number not in self._done:
                if self._is_later(entry.request):
                    return  # it is added after the event, by `read`
                self._add(entry)

    def collect(self) -> None:
        """Defer the requests made during the batches of the current block."""
        for entry in self._entries.following_requests():
            if _is_of_batch(entry.request) and entry.number not in self._done:
                self.waiting[_batch_of(entry.request)].append(entry)
                self._done.add(entry.number)

    def add_before_in_batch(self, batch: int, event: str) -> None:
        """Do the same as `add_before` for an event of a batch; `batch` is its number in the epoch, from 1."""
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
        for key in sorted(key for key in self.waiting if key <= (progress.epoch, progress.batch)):
            for entry in self.waiting.pop(key):
                self._add(entry)

    def add_votes(self) -> None:
        votes, self._votes = self._votes, []
        for entry in votes:
            self._add(entry)

    def _is_later(self, request: Request) -> bool:
        """Return whether a request is of a replayed plugin, or was made after the first of them was called."""
        plan = self._plan.get(request.event, ())
        first = next((index for index, name in enumerate(plan) if name in self._replayed), len(plan))
        return request.by in self._replayed or request.by in plan[first:]

    def _add(self, entry: RequestEntry) -> None:
        self._done.add(entry.number)
        request = entry.request
        self.has_stop = self.has_stop or request.verb == "stop"
        if request.verb == EVALUATION_VERB:
            self.cut = request
        if request.by not in self._replayed:
            self.has_veto = self.has_veto or request.verb == "veto_stop"
            self._added[entry.number] = self._control.add_recorded(request)


def _place_of(request: Request) -> tuple[Any, ...]:
    return request.verb, request.by, request.epoch, request.batch, request.step


def _is_of_batch(request: Request) -> bool:
    return request.event in BATCH_EVENTS or (not request.event and request.verb in BATCH_VERBS)


def _batch_of(request: Request) -> tuple[int, int]:
    """Return the epoch and the number, from 1, of the batch of a request."""
    return request.epoch, request.batch + (request.event != "batch_end")
