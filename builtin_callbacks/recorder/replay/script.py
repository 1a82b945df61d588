"""The entries of an attempt, with a look ahead at what comes of what is asked now, and their events made anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ....core.metrics.values import Metrics
from ....events import CATALOGUE, Event
from ..format.records import Asked, Attempt, Batches, Entry, Happened, Recounted, Spent

MARCHING = ("epoch_start", "epoch_end", "train_end", "checkpoint_loaded", "run_failed", "run_closed")
BATCHES = "batches"
CHECKPOINTS = ("checkpoint_saved", "checkpoint_pruned", "resume_verified")
KINDS: Final = {kind.name: kind for kind in CATALOGUE}
EXITS: Final = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}


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
        while index < len(self.entries) and isinstance(entry := self.entries[index], Asked | Recounted | Spent):
            if isinstance(entry, Asked) and entry.request.event in CHECKPOINTS:
                return self.next()
            index += 1
        behind = self.entries[index] if index < len(self.entries) else None
        return self.next() if isinstance(behind, Happened) and behind.event in CHECKPOINTS else None

    def what_follows(self) -> Entry | None:
        """Return the next entry with which the run goes on or ends; None where it was killed before."""
        index = self._marches[min(self._at + 1, len(self.entries))]
        return None if index is None else self.entries[index]

    def following(self) -> str:
        """Return the name of that entry: an event's, `batches`, or empty."""
        entry = self.what_follows()
        if self.amid or isinstance(entry, Batches):
            return BATCHES
        return entry.event if isinstance(entry, Happened) else ""

    def goes_back(self, path: Path | None) -> bool:
        """Return whether the run went back to a checkpoint here."""
        entry = self.what_follows()
        if self.amid or not isinstance(entry, Happened) or entry.event != "checkpoint_loaded":
            return False
        told = entry.data["path"]
        return (None if told is None else str(told)) == (None if path is None else str(path))

    def failure(self) -> Happened | None:
        """Return the failure of the run, where that is this entry or the very next event."""
        for index in range(max(0, self._at), len(self.entries) if not self.amid else 0):
            entry = self.entries[index]
            if isinstance(entry, Happened) and entry.event == "run_failed":
                return entry
            if index > self._at and not isinstance(entry, Asked | Recounted | Spent):
                break
        return None

    def directly_behind(self) -> Iterator[Asked]:
        """Yield the requests between this entry and the next one that is none."""
        for index in range(self._at + 1, len(self.entries)):
            entry = self.entries[index]
            if isinstance(entry, Asked):
                yield entry
            elif not isinstance(entry, Recounted | Spent):
                return

    def next_length(self, known: int | None) -> int | None:
        """Return the length of the next epoch that begins, in batches, None where nobody knows; the known one without.

        Args:
            known: the length of the epoch before.
        """
        for index in range(self._at + 1, len(self.entries)):
            entry = self.entries[index]
            if isinstance(entry, Happened) and entry.event == "epoch_start":
                length: int | None = entry.data["batches"]
                return length
        return known

    def ends_epoch(self) -> bool:
        """Return whether the epoch ends behind this block since there was no more batch, not since somebody asked."""
        entry = self.what_follows()
        if not isinstance(entry, Happened) or entry.event not in ("epoch_end", "run_failed"):
            return False
        if entry.event == "run_failed":
            return bool(entry.data["is_last"] and not entry.data["in_hand"])
        for index in range(self._at - 1, -1, -1):
            entry = self.entries[index]
            if isinstance(entry, Happened) and entry.event == "epoch_start":
                break
            if _asks_for_end(entry):
                return False
        end = self._marches[self._at + 1]
        return not any(_asks_for_end(entry) for entry in self.entries[self._at + 1 : end])


def _asks_for_end(entry: Entry) -> bool:
    return isinstance(entry, Asked) and entry.request.verb == "end_epoch"


def _marches(entries: tuple[Entry, ...]) -> list[int | None]:
    """Return, for each index and the one behind the last, where the next entry is with which the run goes on."""
    marches: list[int | None] = [None] * (len(entries) + 1)
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        marching = isinstance(entry, Batches) or (isinstance(entry, Happened) and entry.event in MARCHING)
        marches[index] = index if marching else marches[index + 1]
    return marches


def made(entry: Happened) -> Event | None:
    """Return the event of an entry; None where it is none of the catalogue's."""
    kind = KINDS.get(entry.event)
    if kind is None:
        return None
    values = {each.name: _made(each.name, entry.data) for each in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    return kind(**values)


def _made(name: str, data: Mapping[str, Any]) -> Any:
    value = data[name]
    match name:
        case "path":
            return None if value is None else Path(value)
        case "metrics":
            return Metrics(value)
        case "error":
            kind, _, text = value.partition(": ")  # the text stands beside it, or behind it
            return _error(kind, data.get("text", text))
        case _:
            return value


def _error(kind: str, text: str) -> BaseException:
    """Return an exception of the recorded name that says the recorded text; it is of that type by name only."""
    base = EXITS.get(kind, Exception)
    made: BaseException = type(kind, (base,), {})(text.removeprefix(f"{kind}: "))
    return made
