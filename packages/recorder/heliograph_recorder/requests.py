"""The requests of a control as entries: what is new in its history, and which requests an event serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from heliograph import ChangeServed, History, Request

from .format.plain import NAME, shorten
from .format.records import RepeatEntry, RequestEntry, change_of
from .verbs import COUNTED, TAKEN_BACK

SERVED = {"log": "log", "validation_start": "validation", "save_point": "save", "epoch_end": "end_epoch", "train_end": "stop"}  # fmt: skip  # noqa: E501
MAX_SERVED = 100  # numbers of requests that one event serves
LATEST = 8  # the history may still count up so many of the latest requests


@dataclass(slots=True)
class _Counted:
    number: int
    request: Request
    times: int


class RequestTracker:
    """Follows the history of a control.

    Attributes:
        seen: how many requests were read; less than the history's total if there are new ones.
    """

    def __init__(self, history: History) -> None:
        self.seen = 0
        self._history = history
        self._latest: list[_Counted] = []
        self._pending: dict[str, list[int]] = {}
        self._drops: list[tuple[int, Request]] = []  # how many requests there were, and the veto that dropped some
        history.drop_watcher = self._add_drop

    def detach(self) -> None:
        self._history.drop_watcher = None

    def new_entries(self) -> Iterator[RequestEntry | RepeatEntry]:
        history, total = self._history, self._history.total
        for each in self._latest:
            if each.request.times != each.times:
                each.times = each.request.times
                yield RepeatEntry(each.number, each.times)
        kept = min(total - self.seen, len(history))  # of very many at once, the history has dropped the first
        for number in range(total - kept, total):
            yield from self._dropped_by(number)
            request = history[number - total]
            if request.verb in COUNTED:
                self._latest.append(_Counted(number, request, request.times))
            self._take_back(request)
            pending = self._pending.setdefault(request.what, [])
            if len(pending) < MAX_SERVED:
                pending.append(number)
            yield RequestEntry(number, _shortened(request))
        yield from self._dropped_by(total)
        self._latest = self._latest[-LATEST:]
        self.seen = total

    def _add_drop(self, veto: Request) -> None:
        self._drops.append((self._history.total, veto))

    def _dropped_by(self, total: int) -> Iterator[RepeatEntry]:
        while self._drops and self._drops[0][0] <= total:
            veto = self._drops.pop(0)[1]
            self._pending.pop(TAKEN_BACK[veto.verb], None)
            yield from (RepeatEntry(each.number, each.times) for each in self._latest if each.request is veto)

    def _take_back(self, request: Request) -> None:
        if request.verb in TAKEN_BACK and request.verb not in COUNTED:
            self._pending.pop(TAKEN_BACK[request.verb], None)

    def pop_served(self, event: str, data: Mapping[str, Any]) -> list[int] | None:
        what = SERVED.get(event) if event != ChangeServed.name else change_of(data).what
        return None if what is None else self._pending.pop(what, [])

    def drop_pending(self) -> None:
        self._pending = {verb: numbers for verb, numbers in self._pending.items() if verb == "stop"}


def _shortened(request: Request) -> Request:
    by, target, through = (shorten(each, NAME) for each in (request.by, request.target, request.through))
    reason = shorten(request.reason)
    if (by, target, through, reason) == (request.by, request.target, request.through, request.reason):
        return request
    return replace(request, by=by, target=target, through=through, reason=reason)
