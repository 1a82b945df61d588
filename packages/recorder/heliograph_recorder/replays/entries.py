"""Read the entries of an attempt with a look-ahead, and make their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from heliograph.events import CATALOGUE, Event
from heliograph.spi import Metrics

from ..format.records import AttemptRecord, Batches, Entry, EventEntry, RepeatEntry, RequestEntry, TimesEntry

ENDS = ("last_boundary", "train_end")
MILESTONES = ("epoch_start", "epoch_end", *ENDS, "checkpoint_loaded", "run_failed", "run_closed")
BATCHES = "batches"
CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "resume_verified")
KINDS: Final = {kind.name: kind for kind in CATALOGUE}
EXITS: Final = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}


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
        self._milestones = _next_milestones(attempt.entries)

    def next(self) -> Entry | None:
        self._index = min(self._index + 1, len(self._entries))
        return self._entries[self._index] if self._index < len(self._entries) else None

    def next_of_save(self) -> Entry | None:
        """Return the next entry during a `SavePoint`, if it records a checkpoint or a request about one."""
        index = self._index + 1
        while index < len(self._entries) and isinstance(
            entry := self._entries[index], RequestEntry | RepeatEntry | TimesEntry
        ):
            if isinstance(entry, RequestEntry) and entry.request.event in CHECKPOINTS:
                return self.next()
            index += 1
        after = self._entries[index] if index < len(self._entries) else None
        return self.next() if isinstance(after, EventEntry) and after.event in CHECKPOINTS else None

    def next_milestone(self) -> Entry | None:
        index = self._milestones[min(self._index + 1, len(self._entries))]
        return None if index is None else self._entries[index]

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

    def failure(self) -> EventEntry | None:
        """Return `run_failed` if it is the current entry or the next event."""
        for index in range(max(0, self._index), len(self._entries) if not self.in_block else 0):
            entry = self._entries[index]
            if isinstance(entry, EventEntry) and entry.event == "run_failed":
                return entry
            if index > self._index and not isinstance(entry, RequestEntry | RepeatEntry | TimesEntry):
                break
        return None

    def following_requests(self) -> Iterator[RequestEntry]:
        for index in range(self._index + 1, len(self._entries)):
            entry = self._entries[index]
            if isinstance(entry, RequestEntry):
                yield entry
            elif not isinstance(entry, RepeatEntry | TimesEntry):
                return

    def next_epoch_length(self, previous: int | None) -> int | None:
        """Return the number of batches of the next epoch, None if it was unknown; `previous` if there is no epoch."""
        for index in range(self._index + 1, len(self._entries)):
            entry = self._entries[index]
            if isinstance(entry, EventEntry) and entry.event == "epoch_start":
                length: int | None = entry.data["batches"]
                return length
        return previous

    def ends_epoch(self) -> bool:
        """Return whether the end of the loader ends the epoch after this block, instead of a request."""
        entry = self.next_milestone()
        if not isinstance(entry, EventEntry) or entry.event not in ("epoch_end", "run_failed"):
            return False
        if entry.event == "run_failed":
            return bool(entry.data["is_last"] and not entry.data["in_hand"])
        for index in range(self._index - 1, -1, -1):
            entry = self._entries[index]
            if isinstance(entry, EventEntry) and entry.event == "epoch_start":
                break
            if _requests_epoch_end(entry):
                return False
        end = self._milestones[self._index + 1]
        return not any(_requests_epoch_end(entry) for entry in self._entries[self._index + 1 : end])


def _requests_epoch_end(entry: Entry) -> bool:
    return isinstance(entry, RequestEntry) and entry.request.verb == "end_epoch"


def _next_milestones(entries: tuple[Entry, ...]) -> list[int | None]:
    milestones: list[int | None] = [None] * (len(entries) + 1)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        is_milestone = isinstance(entry, Batches) or (isinstance(entry, EventEntry) and entry.event in MILESTONES)
        milestones[index] = index if is_milestone else milestones[index + 1]
    return milestones


def make_event(entry: EventEntry) -> Event | None:
    kind = KINDS.get(entry.event)
    if kind is None:
        return None
    recorded = [field.name for field in fields(kind) if field.default_factory is MISSING]  # type: ignore[arg-type]  # a dataclass
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
