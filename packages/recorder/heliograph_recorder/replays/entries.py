"""Read the entries of an attempt with a look-ahead, make their events, and add the requests of other plugins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from heliograph.events import CATALOGUE, Event, Request
from heliograph.spi import Metrics

from ..format.records import AttemptRecord, Batches, Entry, EventEntry, RepeatEntry, RequestEntry, TimesEntry
from ..verbs import EVALUATION_VERB, VERBS
from .run import ReplayRun

ENDS = ("last_boundary", "train_end")
MILESTONES = ("epoch_start", "epoch_end", *ENDS, "checkpoint_loaded", "run_failed", "run_closed")
BATCHES = "batches"
CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "resume_verified", "late_result")
KINDS: Final = {kind.name: kind for kind in CATALOGUE}
EXITS: Final = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}

BATCH_EVENTS: Final = ("batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end")
_ORDER: Final = {event: place for place, event in enumerate(("batch_start", "", *BATCH_EVENTS[1:]))}
BATCH_VERBS: Final = [verb for verb, facts in VERBS.items() if facts.about in ("batch", "step")]


class Entries:
    """Read the entries of an attempt in order.

    The milestones are the blocks of batches and the events with which a run continues or ends. They show what the run
    decided at the previous boundary.

    Attributes:
        in_block: whether the current batch is followed by another batch of its block.
    """

    def __init__(self, attempt: AttemptRecord) -> None:
        self.in_block = False
        self._entries = attempt.entries
        self._index = -1

    def next(self) -> Entry | None:
        self._index = min(self._index + 1, len(self._entries))
        return self._entries[self._index] if self._index < len(self._entries) else None

    def _following(self) -> Iterator[Entry]:
        return (self._entries[index] for index in range(self._index + 1, len(self._entries)))

    def next_of_save(self) -> Entry | None:
        """Return the next entry during a `SavePoint`, if it records a checkpoint or a request about one."""
        for entry in self._following():
            if isinstance(entry, EventEntry):
                return self.next() if entry.event in CHECKPOINTS else None
            if isinstance(entry, RequestEntry) and entry.request.event in CHECKPOINTS:
                return self.next()
            if not isinstance(entry, RequestEntry | RepeatEntry | TimesEntry):
                return None
        return None

    def next_milestone(self) -> Entry | None:
        for entry in self._following():
            if isinstance(entry, Batches) or (isinstance(entry, EventEntry) and entry.event in MILESTONES):
                return entry
        return None

    def next_milestone_name(self) -> str:
        entry = self.next_milestone()
        if self.in_block or isinstance(entry, Batches):
            return BATCHES
        return entry.event if isinstance(entry, EventEntry) else ""

    def rolls_back_to(self, path: Path | None) -> bool:
        entry = self.next_milestone()
        if self.in_block or not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
            return False
        return bool(entry.data["path"] == (None if path is None else str(path)))

    def following_requests(self) -> Iterator[RequestEntry]:
        for entry in self._following():
            if isinstance(entry, RequestEntry):
                yield entry
            elif not isinstance(entry, RepeatEntry | TimesEntry):
                return

    def next_epoch_length(self, previous: int | None) -> int | None:
        """Return the number of batches of the next epoch, None if it was unknown; `previous` if there is no epoch."""
        for entry in self._following():
            if isinstance(entry, EventEntry) and entry.event == "epoch_start":
                length: int | None = entry.data["batches"]
                return length
        return previous

    def ends_epoch(self) -> bool:
        """Return whether the end of the loader ends the epoch after this block, instead of a request."""
        entry = self.next_milestone()
        return isinstance(entry, EventEntry) and entry.event == "epoch_end" and not entry.data["asked"]


def make_event(entry: EventEntry) -> Event | None:
    kind = KINDS.get(entry.event)
    if kind is None:
        return None
    recorded = [field.name for field in fields(kind) if field.default_factory is MISSING]
    return kind(**{name: _field(name, entry.data) for name in recorded})


def _field(name: str, data: Mapping[str, Any]) -> Any:
    value = data[name]
    match name:
        case "path":
            return None if value is None else Path(value)
        case "metrics":
            return Metrics(value)
        case "error":
            kind, _, text = value.partition(": ")  # plugin_failed has the type and the text, run_failed only the type
            return _make_error(kind, data.get("text", text))
        case _:
            return value


def _make_error(kind: str, text: str) -> BaseException:
    """Return an exception whose class has the recorded name; the original class is unknown."""
    base = EXITS.get(kind, Exception)
    error: BaseException = type(kind, (base,), {})(text.removeprefix(f"{kind}: "))
    return error


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


def _is_of_batch(request: Request) -> bool:
    return request.event in BATCH_EVENTS or (not request.event and request.verb in BATCH_VERBS)


def _batch_of(request: Request) -> tuple[int, int]:
    """Return the epoch and the number, from 1, of the batch of a request."""
    return request.epoch, request.batch + (request.event != "batch_end")
