"""What the replayed plugins asked, and what became of it in the recorded run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ....events import Request
from ....events.control import Verb
from .report import Asking, Ending


@dataclass(slots=True)
class Entry:
    """A request under way."""

    attempt: int
    request: Request
    behind_end: bool
    did: bool | None = None
    settled: bool = False


class Ledger:
    """Writes down requests, endings, and what plugins could not do."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ends: list[Ending] = []
        self.unheld: dict[str, list[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.departed = False  # the run would not have come here
        self._attempt = 0
        self._open: defaultdict[Verb, list[Entry]] = defaultdict(list)
        self._counted: dict[int, Entry] = {}  # by the request's id

    def begin(self, attempt: int) -> None:
        """Begin an attempt, counted from 1."""
        self._attempt = attempt
        self._open.clear()
        self._counted.clear()

    def hear(self, request: Request) -> None:
        """Take down a request; one that is only counted up is known already."""
        entry = self._counted.get(id(request))
        if entry is None:
            entry = Entry(self._attempt, request, self.departed)
            self._counted[id(request)] = entry
            self.entries.append(entry)
        self._open[request.verb].append(entry)

    def settle(self, verb: Verb, did: bool | None) -> None:
        """Note whether the recorded run did what was asked."""
        for entry in self._open.pop(verb, ()):
            if not entry.settled:
                entry.did = did
            elif entry.did is not None:  # of one that was made again and again: every time
                entry.did = None if did is None else entry.did and did
            entry.settled = True

    def close(self, *, was_killed: bool) -> None:
        """End an attempt: what is open by now was never done, or nobody knows."""
        for verb in list(self._open):
            self.settle(verb, None if was_killed or verb in ("scale_loss", "next_phase") else False)

    def end(self, by: str, reason: str, place: tuple[int, int, int], *, did: bool | None, failure: bool) -> None:
        """Note where the attempt would have ended; the first time counts."""
        if not self.departed and all(end.attempt != self._attempt for end in self.ends):
            self.ends.append(Ending(self._attempt, by, reason, failure, *place, did))
        self.departed = self.departed or did is False

    def tell(self, plugin: str, text: str) -> None:
        """Note what a plugin was told that the recording does not hold, once."""
        _add(self.unheld, plugin, text)

    def fail(self, plugin: str, text: str) -> None:
        """Note which error a plugin raised."""
        _add(self.failed, plugin, text)

    def note(self, text: str) -> None:
        """Note something for people, once."""
        if text not in self.notes:
            self.notes.append(text)

    def asked(self) -> tuple[Asking, ...]:
        """Return all requests."""
        return tuple(Asking(each.attempt, each.request, each.did, each.behind_end) for each in self.entries)


def _add(table: dict[str, list[str]], plugin: str, text: str) -> None:
    lines = table.setdefault(plugin, [])
    if text not in lines:
        lines.append(text)
