"""Follow the history of a control: what was asked since the last look, and what an event serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from ...events import History, Request
from .format.plain import CHARACTERS, NAME, short
from .format.records import RepeatEntry, RequestEntry

SERVED = {"log": "log", "validation_start": "validation", "save_point": "save", "epoch_end": "end_epoch", "train_end": "stop"}  # fmt: skip  # noqa: E501
KEPT = 100  # numbers of requests that one event serves
COUNTED = 8  # of the latest requests, those that the history may still count up


@dataclass(slots=True)
class _Counted:
    number: int
    request: Request
    times: int


class Asking:
    """What of a history was told.

    Attributes:
        told: how many requests; less than the history's total where there are new ones.
    """

    def __init__(self, history: History) -> None:
        self.told = 0
        self._history = history
        self._latest: list[_Counted] = []
        self._standing: dict[str, list[int]] = {}

    def news(self) -> Iterator[RequestEntry | RepeatEntry]:
        """Yield what was asked, and asked again, since the last call."""
        history, total = self._history, self._history.total
        for each in self._latest:
            if each.request.times != each.times:
                each.times = each.request.times
                yield RepeatEntry(each.number, each.times)
        held = min(total - self.told, len(history))  # of very many at once, the history has dropped the first
        for number, request in enumerate(islice(history, len(history) - held, None), total - held):
            self._latest.append(_Counted(number, request, request.times))
            standing = self._standing.setdefault(request.verb, [])
            if len(standing) < KEPT:
                standing.append(number)
            if len(request.by) > NAME or len(request.reason) > CHARACTERS:
                request = replace(request, by=short(request.by, NAME), reason=short(request.reason))
            yield RequestEntry(number, request)
        self._latest = self._latest[-COUNTED:]
        self.told = total

    def served_by(self, event: str) -> list[int] | None:
        """Return the numbers of the requests that an event serves, None for an event that serves none."""
        return self._standing.pop(SERVED[event], []) if event in SERVED else None

    def turn_back(self) -> None:
        """Forget what stands, as a run does that goes back; all but a stop."""
        self._standing = {verb: numbers for verb, numbers in self._standing.items() if verb == "stop"}
