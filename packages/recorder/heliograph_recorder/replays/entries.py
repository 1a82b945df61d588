"""Read the entries of an attempt with a look-ahead, make their events, and add the requests of other plugins."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Final

from heliograph.events import CATALOGUE, CHANGES, Control, Event, Request
from heliograph.spi import Metrics

from ..format.records import (
    AttemptRecord,
    Batch,
    Batches,
    DigestBlock,
    Entry,
    EventEntry,
    RepeatEntry,
    RequestEntry,
    TimesEntry,
)
from ..verbs import LOADED, TAKEN_BACK

MILESTONES = ("epoch_start", "epoch_end", "last_boundary", "train_end", "checkpoint_loaded", "run_failed", "run_closed")
BATCHES = "batches"
CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "resume_verified", "late_result")
KINDS: Final = {kind.name: kind for kind in CATALOGUE}
EXITS: Final = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}
BATCH_EVENTS: Final = ("batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end")
WAITED_FOR: Final = (*BATCH_EVENTS, "should_stop")  # in order
AT_BOUNDARY: Final = ("stop", "end_epoch", "roll_back", "log", "validation", "save", "next_phase", *CHANGES)

ReplayEntry = Entry | Batch


class Entries:
    """Read the entries of an attempt in order.

    The milestones are the batches and the events with which a run continues or ends. They show what the run decided at
    the previous boundary.
    """

    def __init__(self, attempt: AttemptRecord) -> None:
        self._entries = deque[ReplayEntry](
            entry for entry in attempt.entries if not isinstance(entry, TimesEntry | DigestBlock)
        )

    def next(self) -> ReplayEntry | None:
        return self._entries.popleft() if self._entries else None

    def peek(self) -> ReplayEntry | None:
        return self._entries[0] if self._entries else None

    def insert(self, block: Batches) -> None:
        """Insert the batches of a block as the next entries."""
        self._entries.extendleft(reversed(tuple(block)))

    def ends_boundary(self, batch: int) -> bool:
        """Return whether nothing more of the boundary after a batch follows."""
        entry = self.peek()
        if isinstance(entry, RequestEntry):
            return entry.request.event in BATCH_EVENTS and not is_during(entry, batch)
        is_of_load = isinstance(entry, EventEntry) and entry.data.get("by") == LOADED
        return entry is None or is_of_load or _is_milestone(entry)

    def milestone(self) -> str:
        """Return the name of the next milestone: an event or `batches`; empty if the run was killed before it."""
        entry = next(filter(_is_milestone, self._entries), None)
        if isinstance(entry, Batches | Batch):
            return BATCHES
        return entry.event if isinstance(entry, EventEntry) else ""

    def ends_epoch(self) -> bool:
        """Return whether the end of the loader ends the epoch here, instead of a request."""
        milestones = filter(_is_milestone, self._entries)
        entry = next(milestones, None)
        if isinstance(entry, EventEntry) and entry.event == "epoch_start" and entry.data["resumed"]:
            entry = next(milestones, None)
        return isinstance(entry, EventEntry) and entry.event == "epoch_end" and not entry.data["asked"]

    def first_epoch_length(self) -> int | None:
        """Return the number of batches of the first epoch; None if it was unknown, or no epoch is recorded."""
        events = (entry for entry in self._entries if isinstance(entry, EventEntry))
        return next((event.data["batches"] for event in events if event.event == "epoch_start"), None)


def _is_milestone(entry: ReplayEntry) -> bool:
    return isinstance(entry, Batches | Batch) or (isinstance(entry, EventEntry) and entry.event in MILESTONES)


def is_during(entry: ReplayEntry | None, batch: int) -> bool:
    """Return whether an entry after a batch, numbered from 1, records requests made during the batch."""
    if isinstance(entry, RequestEntry):
        request = entry.request
        return request.event in BATCH_EVENTS and request.batch + (request.event != "batch_end") <= batch
    return isinstance(entry, RepeatEntry)


def is_of_event(entry: ReplayEntry | None, *events: str) -> bool:
    """Return whether an entry after an event records requests made during it, or during one of several events."""
    return isinstance(entry, RepeatEntry) or (isinstance(entry, RequestEntry) and entry.request.event in events)


def is_of_save(entry: ReplayEntry | None) -> bool:
    """Return whether an entry after a `SavePoint` records a checkpoint, or a request during the save."""
    is_checkpoint = isinstance(entry, EventEntry) and entry.event in CHECKPOINTS
    return is_checkpoint or is_of_event(entry, "save_point", *CHECKPOINTS)


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
        case "error":  # the original class is unknown
            kind, _, text = value.partition(": ")  # plugin_failed has the type and the text, run_failed only the type
            base = EXITS.get(kind, Exception)
            return type(kind, (base,), {})(data.get("text", text).removeprefix(f"{kind}: "))
        case _:
            return value


class RecordedRequests:
    """The recorded requests, except those of replayed plugins.

    A request from an event of a batch or from `ShouldStop` waits for the event. Other requests are added when their
    entry is read.

    Args:
        control: the control of the replayed run.
        replayed: the names of the replayed plugins.

    Attributes:
        has_veto: whether a stop has been vetoed.
    """

    def __init__(self, control: Control, replayed: Collection[str]) -> None:
        self._control, self._replayed = control, replayed
        self._waiting = deque[Request]()
        self._added: dict[int, Request] = {}
        self.has_veto = False

    def read(self, entry: RequestEntry | RepeatEntry) -> None:
        if isinstance(entry, RepeatEntry):
            if entry.number in self._added:
                self._added[entry.number].times = entry.times
            return
        request = self._added[entry.number] = replace(entry.request)
        if request.event in WAITED_FOR:
            self._waiting.append(request)
        else:
            self._add(request)

    def add_waiting(self, event: str) -> None:
        """Add the requests that wait for an event, or for an earlier one."""
        while self._waiting and WAITED_FOR.index(self._waiting[0].event) <= WAITED_FOR.index(event):
            self._add(self._waiting.popleft())

    def _add(self, request: Request) -> None:
        if request.by in self._replayed or request.through in self._replayed:
            return
        control, verb = self._control, request.verb
        due, pending = control.open_requests(), control.pending
        if verb in AT_BOUNDARY and request.what not in due:
            due[request.what] = request  # `adopt` adds it to the history
        else:
            control.history.add(request)
        if verb == "veto_stop":
            self.has_veto = True
        elif verb == "cut_validation":
            control.cut_request = request
        elif verb.startswith("withdraw_"):
            due.pop(TAKEN_BACK[verb], None)
        control.adopt(due, vetoed=control.vetoed or verb == "veto_stop")
        control.pending |= pending  # until the boundary ends
