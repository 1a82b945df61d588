"""What the replayed plugins requested, and whether the recorded run did it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from heliograph import Request
from heliograph.events import Verb

from .report import Ending, ReplayedRequest


@dataclass(slots=True)
class RequestFinding:
    """A request of a replayed plugin.

    Attributes:
        after_end: whether the run would have ended before it.
        did: whether the recorded run did what was requested; None where that is unknown.
        is_decided: whether `did` was set.
    """

    attempt: int
    request: Request
    after_end: bool
    did: bool | None = None
    is_decided: bool = False


class Findings:
    """Collects requests, endings, and what plugins could not do.

    Attributes:
        has_diverged: whether the run would have ended before this point.
    """

    def __init__(self) -> None:
        self.requests: list[RequestFinding] = []
        self.ends: list[Ending] = []
        self.unheld: dict[str, list[str]] = {}
        self.failed: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self.has_diverged = False
        self._attempt = 0
        self._open: defaultdict[Verb, list[RequestFinding]] = defaultdict(list)
        self._by_id: dict[int, RequestFinding] = {}

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._open.clear()
        self._by_id.clear()

    def add(self, request: Request) -> None:
        finding = self._by_id.get(id(request))
        if finding is None:
            finding = RequestFinding(self._attempt, request, self.has_diverged)
            self._by_id[id(request)] = finding
            self.requests.append(finding)
        self._open[request.verb].append(finding)

    def decide(self, verb: Verb, did: bool | None) -> None:
        for finding in self._open.pop(verb, ()):
            if not finding.is_decided:
                finding.did = did
            elif finding.did is not None:  # of one that was made again and again: every time
                finding.did = None if did is None else finding.did and did
            finding.is_decided = True

    def decide_change(self, change: Request, *, did: bool) -> None:
        others = [each for each in self._open[change.verb] if each.request.what != change.what]
        self._open[change.verb] = [each for each in self._open[change.verb] if each.request.what == change.what]
        self.decide(change.verb, did)
        self._open[change.verb] = others

    def close(self, *, was_killed: bool) -> None:
        for verb in list(self._open):
            self.decide(verb, None if was_killed or verb in ("scale_loss", "next_phase") else False)

    def add_end(self, by: str, reason: str, place: tuple[int, int, int], *, did: bool | None, failure: bool) -> None:
        if not self.has_diverged and all(end.attempt != self._attempt for end in self.ends):
            self.ends.append(Ending(self._attempt, by, reason, failure, *place, did))
        self.has_diverged = self.has_diverged or did is False

    def add_unheld(self, plugin: str, text: str) -> None:
        _add(self.unheld, plugin, text)

    def add_failure(self, plugin: str, text: str) -> None:
        _add(self.failed, plugin, text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def asked(self) -> tuple[ReplayedRequest, ...]:
        return tuple(ReplayedRequest(each.attempt, each.request, each.did, each.after_end) for each in self.requests)


def _add(table: dict[str, list[str]], plugin: str, text: str) -> None:
    lines = table.setdefault(plugin, [])
    if text not in lines:
        lines.append(text)
