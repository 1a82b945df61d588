"""The result of a replay."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from heliograph.events import Request, Status, Verb
from heliograph.spi import printable

SHOWN = 20  # requests of one plugin
DID = {True: "the run did so", False: "the run did not", None: ""}


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Describe a request of a replayed plugin.

    Attributes:
        attempt: the number of the attempt, from 1.
        request: the request.
        did: whether the recorded run did the same, regardless of the requester; None if unknown.
        after_end: whether the run would have ended, or failed, before the request.
    """

    attempt: int
    request: Request
    did: bool | None
    after_end: bool

    def __str__(self) -> str:
        did = f" ({DID[self.did]})" if DID[self.did] else ""
        return f"attempt {self.attempt}, {_describe(self.request)}{did}"


@dataclass(frozen=True, slots=True)
class ReplayEnding:
    """Describe where a replayed plugin would have ended an attempt.

    Attributes:
        attempt: the number of the attempt, from 1.
        by: the plugin that ends the attempt.
        reason: the reason of its stop, or the error that it raises, with the event.
        is_failure: whether the plugin raises an error.
        epoch: the number of finished epochs.
        batch: the number of micro-batches consumed in the current epoch.
        step: the number of optimizer steps.
        did: whether the recorded run ended at the same point; None if it was killed there.
    """

    attempt: int
    by: str
    reason: str
    is_failure: bool
    epoch: int
    batch: int
    step: int
    did: bool | None

    def __str__(self) -> str:
        how = "failed" if self.is_failure else "stopped"
        place = f"epoch {self.epoch}, batch {self.batch}, step {self.step}"
        did = {True: "as it did", False: "the recorded run continued", None: "it was killed there"}[self.did]
        return f"attempt {self.attempt} would have ended at {place}, {how} by {self.by}: {self.reason} ({did})"


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """Describe the recorded end of an attempt.

    Attributes:
        attempt: the number of the attempt, from 1.
        status: the status at the end; None if the run was killed or is running.
        reason: the reason of the end, if it is recorded.
        epoch: the number of finished epochs.
        batch: the number of micro-batches consumed in the current epoch.
        step: the number of optimizer steps.
        requests: the requests of the plugins with the names of the replayed ones.
    """

    attempt: int
    status: Status | None
    reason: str
    epoch: int
    batch: int
    step: int
    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return self.describe(is_last=True)

    def describe(self, *, is_last: bool) -> str:
        """Return a sentence; `is_last` is whether no other attempt followed, so that it may be running."""
        how = self.status or ("killed, or is running," if is_last else "killed")
        reason = f": {self.reason}" if self.reason else ""
        return f"attempt {self.attempt} was {how} at epoch {self.epoch}, batch {self.batch}, step {self.step}{reason}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Hold the result of a replay; `str` returns a readable report.

    Attributes:
        recording: the file.
        plugins: the names of the replayed plugins.
        asked: their requests in order; a repeated request is listed once, with `times`.
        recorded: the recorded attempts.
        ends: where the replayed plugins would have ended the attempts, at most one entry for each attempt.
        unheld: by plugin, the unrecorded data that it needed, with the position at which it was switched off.
        failed: by plugin, the errors that its handlers raised, with their position.
        notes: other remarks.
    """

    recording: Path
    plugins: tuple[str, ...]
    asked: tuple[ReplayedRequest, ...]
    recorded: tuple[RecordedAttempt, ...]
    ends: tuple[ReplayEnding, ...]
    unheld: dict[str, tuple[str, ...]]
    failed: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def requests(self, plugin: str) -> list[Request]:
        """Return the requests of a replayed plugin, in order."""
        return [replayed.request for replayed in self.asked if replayed.request.by == plugin]

    def __str__(self) -> str:
        lines = [f"replay of {self.recording} with {', '.join(self.plugins) or 'no plugin'}"]
        lines += [f"  recorded: {record.describe(is_last=record is self.recorded[-1])}" for record in self.recorded]
        lines += [f"  replayed: {end}" for end in self.ends]
        for plugin in self.plugins:
            lines += self._plugin_lines(plugin)
        return "\n".join(printable(line) for line in [*lines, *self.notes])

    def _plugin_lines(self, plugin: str) -> list[str]:
        replayed = [request for request in self.asked if request.request.by == plugin]
        before = [request for request in replayed if not request.after_end]
        after = [request for request in replayed if request.after_end]
        counts = Counter(request.request.verb for request in before)
        words = ", ".join(f"{verb} {count_times(count)}" for verb, count in counts.items())
        lines = [f"{plugin} would have requested {words or 'nothing'}"]
        lines += [f"  {request}" for request in before[:SHOWN]]
        lines += [f"  and {len(before) - SHOWN} more"] * (len(before) > SHOWN)
        if after:
            lines.append(f"  and {count_times(len(after))} more after that end, since the recorded run continued")
            lines += [f"    the first: {after[0]}"] * (not before)
        lines += [f"  then it was switched off: {text}" for text in self.unheld.get(plugin, ())]
        lines += [f"  then it failed: {text}" for text in self.failed.get(plugin, ())]
        recorded = [
            (record.attempt, request) for record in self.recorded for request in record.requests if request.by == plugin
        ]
        if recorded and recorded != [(request.attempt, request.request) for request in replayed]:
            attempt, first = recorded[0]
            number = "one request" if len(recorded) == 1 else f"{len(recorded)} requests, the first"
            lines.append(f"  in the recorded run it made {number}: attempt {attempt}, {_describe(first)}")
        return lines


def _describe(request: Request) -> str:
    place = f"epoch {request.epoch} batch {request.batch} step {request.step}"
    event = f" on {request.event}" if request.event else ""
    times = f" (x{request.times})" if request.times > 1 else ""
    return f"{place}{event}: {request.verb}{times} - {request.reason}"


def count_times(number: int) -> str:
    """Return `once` or `3 times`."""
    return "once" if number == 1 else f"{number} times"


@dataclass(slots=True)
class RequestFinding:
    """A `ReplayedRequest` in progress; `is_decided` is whether `did` was set."""

    attempt: int
    request: Request
    after_end: bool
    did: bool | None = None
    is_decided: bool = False


class ReplayFindings:
    """Collect the requests, ends and errors of replayed plugins.

    Attributes:
        has_diverged: whether the run would have ended before the current position.
    """

    def __init__(self) -> None:
        self.requests: list[RequestFinding] = []
        self.ends: list[ReplayEnding] = []
        self.unheld: defaultdict[str, dict[str, None]] = defaultdict(dict)  # texts by plugin
        self.failed: defaultdict[str, dict[str, None]] = defaultdict(dict)
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
        """Add a request; a repeated request is listed once."""
        finding = self._by_id.get(id(request))
        if finding is None:
            finding = RequestFinding(self._attempt, request, self.has_diverged)
            self._by_id[id(request)] = finding
            self.requests.append(finding)
        self._open[request.verb].append(finding)

    def decide(self, verb: Verb, did: bool | None) -> None:
        """Note for the open requests of a verb whether the recorded run did the same."""
        for finding in self._open.pop(verb, ()):
            if not finding.is_decided:
                finding.did = did
            elif finding.did is not None:  # of a repeated request: every time
                finding.did = None if did is None else finding.did and did
            finding.is_decided = True

    def decide_change(self, change: Request, *, did: bool) -> None:
        findings = self._open[change.verb]
        self._open[change.verb] = [finding for finding in findings if finding.request.what == change.what]
        self.decide(change.verb, did)
        self._open[change.verb] = [finding for finding in findings if finding.request.what != change.what]

    def close(self, *, was_killed: bool) -> None:
        """End an attempt: open requests were not served, unless that is unknown."""
        for verb in list(self._open):
            self.decide(verb, None if was_killed or verb in ("scale_loss", "next_phase") else False)

    def add_end(self, by: str, reason: str, place: tuple[int, int, int], *, did: bool | None, failure: bool) -> None:
        if not self.has_diverged and all(end.attempt != self._attempt for end in self.ends):
            self.ends.append(ReplayEnding(self._attempt, by, reason, failure, *place, did))
        self.has_diverged = self.has_diverged or did is False

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def asked(self) -> tuple[ReplayedRequest, ...]:
        return tuple(
            ReplayedRequest(finding.attempt, finding.request, finding.did, finding.after_end)
            for finding in self.requests
        )
