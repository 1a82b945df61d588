"""Read the entries of an attempt with a look-ahead, make their events, and add the requests of other plugins."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from operator import itemgetter
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
_ORDER: Final[Mapping[str | None, int]] = {
    event: place for place, event in enumerate(("batch_start", "", *BATCH_EVENTS[1:]))
}
Place = tuple[int, int, int, int]  # loads, epoch, batch, event
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

    def peek(self) -> Entry | None:
        return next(self._following(), None)

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

    The requests about batches are added by `add_until`, all others when their entry is read.

    Args:
        attempt: the recorded attempt.
        run: the replayed run.
        replayed: the names of the replayed plugins.

    Attributes:
        loads: the number of loaded states so far, after which batches may be repeated.
        cut: the last request to cut a validation short.
        has_stop: whether a stop was requested in the recorded run.
        has_veto: whether a plugin that is not replayed postponed a stop.
    """

    def __init__(self, attempt: AttemptRecord, run: ReplayRun, replayed: Collection[str]) -> None:
        self.loads = 0
        self.cut: Request | None = None
        self.has_stop = self.has_veto = False
        self._plan, self._run, self._replayed = attempt.plan, run, replayed
        self._votes: list[RequestEntry] = []
        self._added: dict[int, Request] = {}
        loads, of_batches = 0, list[tuple[Place, RequestEntry]]()
        for entry in attempt.entries:
            if isinstance(entry, RequestEntry) and _is_of_batch(entry.request):
                of_batches.append(((loads, *_place_of(entry.request)), entry))
            loads += isinstance(entry, EventEntry) and entry.event == "checkpoint_loaded"
        self._of_batches = deque(sorted(of_batches, key=itemgetter(0)))

    def read(self, entry: RequestEntry | RepeatEntry) -> None:
        if isinstance(entry, RepeatEntry):
            if entry.number in self._added:
                self._added[entry.number].times = entry.times
        elif entry.request.event == "should_stop":
            self._votes.append(entry)  # until the boundary ends
        elif not _is_of_batch(entry.request):
            self._add(entry)

    def is_before(self, entry: Entry, event: str) -> bool:
        """Return whether an entry after an event records requests made before the first replayed plugin was called."""
        if isinstance(entry, RequestEntry):
            return entry.request.event == event and not self._is_later(entry.request)
        return isinstance(entry, RepeatEntry | TimesEntry)

    def add_until(self, batch: int, event: str | None = None) -> None:
        """Add the requests about batches, until the first replayed plugin is called for an event of a batch.

        Args:
            batch: the batch, from 1.
            event: the event; None for the end of the batch.
        """
        place = self.loads, self._run.progress.epoch, batch, _ORDER.get(event, len(_ORDER))
        while self._of_batches and self._of_batches[0][0] <= place:
            if self._of_batches[0][0] == place and self._is_later(self._of_batches[0][1].request):
                return
            self._add(self._of_batches.popleft()[1])

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
        request = entry.request
        self.has_stop = self.has_stop or request.verb == "stop"
        if request.verb == EVALUATION_VERB:
            self.cut = request
        if request.by not in self._replayed:
            self.has_veto = self.has_veto or request.verb == "veto_stop"
            self._added[entry.number] = self._run.own_control.add_recorded(request)


def _is_of_batch(request: Request) -> bool:
    return request.event in BATCH_EVENTS or (not request.event and request.verb in BATCH_VERBS)


def _place_of(request: Request) -> tuple[int, int, int]:
    """Return the epoch, the number of the batch, from 1, and the place of the event of a request."""
    return request.epoch, request.batch + (request.event != "batch_end"), _ORDER[request.event]
