"""The entries of an attempt, with a look ahead at what comes of what is asked now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..format.records import Attempt, Batches, Entry, EventEntry, RepeatEntry, RequestEntry, TimesEntry

MARCHING = ("epoch_start", "epoch_end", "train_end", "checkpoint_loaded", "run_failed", "run_closed")
BATCHES = "batches"
CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "resume_verified")


class Script:
    """Reads an attempt from its first entry to its last.

    Args:
        attempt: which.

    Attributes:
        entries: its entries.
        amid: whether the batch in hand is followed by another of its block.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.entries = attempt.entries
        self.amid = False
        self._at = -1
        self._marches = _marches(attempt.entries)

    def next(self) -> Entry | None:
        """Go on to the next entry and return it; None behind the last one."""
        self._at = min(self._at + 1, len(self.entries))
        return self.entries[self._at] if self._at < len(self.entries) else None

    def next_nested(self) -> Entry | None:
        """The same amid a `SavePoint`, as long as it comes of what was written, pruned or compared then."""
        index = self._at + 1
        while index < len(self.entries) and isinstance(
            entry := self.entries[index], RequestEntry | RepeatEntry | TimesEntry
        ):
            if isinstance(entry, RequestEntry) and entry.request.event in CHECKPOINTS:
                return self.next()
            index += 1
        behind = self.entries[index] if index < len(self.entries) else None
        return self.next() if isinstance(behind, EventEntry) and behind.event in CHECKPOINTS else None

    def what_follows(self) -> Entry | None:
        """Return the next entry with which the run goes on or ends; None where it was killed before."""
        index = self._marches[min(self._at + 1, len(self.entries))]
        return None if index is None else self.entries[index]

    def following(self) -> str:
        """Return the name of that entry: an event's, `batches`, or empty."""
        entry = self.what_follows()
        if self.amid or isinstance(entry, Batches):
            return BATCHES
        return entry.event if isinstance(entry, EventEntry) else ""

    def goes_back(self, path: Path | None) -> bool:
        """Return whether the run went back to a checkpoint here."""
        entry = self.what_follows()
        if self.amid or not isinstance(entry, EventEntry) or entry.event != "checkpoint_loaded":
            return False
        told = entry.data["path"]
        return (None if told is None else str(told)) == (None if path is None else str(path))

    def failure(self) -> EventEntry | None:
        """Return the failure of the run, where that is this entry or the very next event."""
        for index in range(max(0, self._at), len(self.entries) if not self.amid else 0):
            entry = self.entries[index]
            if isinstance(entry, EventEntry) and entry.event == "run_failed":
                return entry
            if index > self._at and not isinstance(entry, RequestEntry | RepeatEntry | TimesEntry):
                break
        return None

    def directly_behind(self) -> Iterator[RequestEntry]:
        """Yield the requests between this entry and the next one that is none."""
        for index in range(self._at + 1, len(self.entries)):
            entry = self.entries[index]
            if isinstance(entry, RequestEntry):
                yield entry
            elif not isinstance(entry, RepeatEntry | TimesEntry):
                return

    def next_length(self, known: int | None) -> int | None:
        """Return the length of the next epoch that begins, in batches, None where nobody knows; the known one without.

        Args:
            known: the length of the epoch before.
        """
        for index in range(self._at + 1, len(self.entries)):
            entry = self.entries[index]
            if isinstance(entry, EventEntry) and entry.event == "epoch_start":
                length: int | None = entry.data["batches"]
                return length
        return known

    def ends_epoch(self) -> bool:
        """Return whether the epoch ends behind this block since there was no more batch, not since somebody asked."""
        entry = self.what_follows()
        if not isinstance(entry, EventEntry) or entry.event not in ("epoch_end", "run_failed"):
            return False
        if entry.event == "run_failed":
            return bool(entry.data["is_last"] and not entry.data["in_hand"])
        for index in range(self._at - 1, -1, -1):
            entry = self.entries[index]
            if isinstance(entry, EventEntry) and entry.event == "epoch_start":
                break
            if _asks_for_end(entry):
                return False
        end = self._marches[self._at + 1]
        return not any(_asks_for_end(entry) for entry in self.entries[self._at + 1 : end])


def _asks_for_end(entry: Entry) -> bool:
    return isinstance(entry, RequestEntry) and entry.request.verb == "end_epoch"


def _marches(entries: tuple[Entry, ...]) -> list[int | None]:
    """Return, for each index and the one behind the last, where the next entry is with which the run goes on."""
    marches: list[int | None] = [None] * (len(entries) + 1)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        marching = isinstance(entry, Batches) or (isinstance(entry, EventEntry) and entry.event in MARCHING)
        marches[index] = index if marching else marches[index + 1]
    return marches
