"""What a replay found."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from heliograph.events import Request, Status, Verb
from heliograph.spi import printable

SHOWN = 20  # requests of one plugin, in full
DID = {True: "the run did so", False: "the run did not", None: ""}


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request that a replayed plugin made.

    Attributes:
        attempt: in which attempt of the run, from 1.
        request: the request.
        did: whether the recorded run did what was requested, by any plugin; None where that is unknown.
        after_end: whether the run would have ended, or failed, before.
    """

    attempt: int
    request: Request
    did: bool | None
    after_end: bool

    def __str__(self) -> str:
        known = f" ({DID[self.did]})" if DID[self.did] else ""
        return f"attempt {self.attempt}, {_describe(self.request)}{known}"


@dataclass(frozen=True, slots=True)
class Ending:
    """Where an attempt would have ended: earlier than it did, or at the same point.

    Attributes:
        attempt: which, from 1.
        by: the plugin that ends it.
        reason: the reason of its stop; or the error that it raises, with the event.
        is_failure: whether it raises.
        epoch: finished epochs there.
        batch: micro-batches consumed in the current epoch.
        step: optimizer steps done.
        did: whether the recorded run ended there too; None where it was killed there.
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
        where = f"epoch {self.epoch}, batch {self.batch}, step {self.step}"
        too = {True: "as it did", False: "the recorded run continued", None: "it was killed there"}[self.did]
        return f"attempt {self.attempt} would have ended at {where}, {how} by {self.by}: {self.reason} ({too})"


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """How an attempt ended according to the recording.

    Attributes:
        attempt: which, from 1.
        status: how it ended; None where it was killed, or is running.
        reason: why, if that is recorded.
        epoch: finished epochs at its end.
        batch: micro-batches consumed in the current epoch.
        step: optimizer steps done.
        requests: those of the plugins that have the names of the replayed ones.
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
        """Return it as a sentence.

        Args:
            is_last: whether no other attempt followed, so that it may be running.
        """
        how = self.status or ("killed, or is running," if is_last else "killed")
        where = f"epoch {self.epoch}, batch {self.batch}, step {self.step}"
        why = f": {self.reason}" if self.reason else ""
        return f"attempt {self.attempt} was {how} at {where}{why}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What plugins would have requested in a recorded run; `str` is a report for people.

    Attributes:
        recording: the file.
        plugins: the names of the replayed plugins.
        asked: their requests, in order; one that was made again and again is listed once, with `times`.
        recorded: what the recording shows, attempt by attempt.
        ends: where the replayed plugins would have ended the attempts, at most one for each attempt.
        unheld: by plugin, what it needed that is not recorded, and where; it was switched off from there on.
        failed: by plugin, the errors that its handlers raised, and where.
        notes: anything else.
    """

    recording: Path
    plugins: tuple[str, ...]
    asked: tuple[ReplayedRequest, ...]
    recorded: tuple[RecordedAttempt, ...]
    ends: tuple[Ending, ...]
    unheld: dict[str, tuple[str, ...]]
    failed: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def requests(self, plugin: str) -> list[Request]:
        """Return the requests of a replayed plugin, in order."""
        return [each.request for each in self.asked if each.request.by == plugin]

    def __str__(self) -> str:
        lines = [f"replay of {self.recording} with {', '.join(self.plugins) or 'no plugin'}"]
        lines += [f"  recorded: {each.describe(is_last=each is self.recorded[-1])}" for each in self.recorded]
        lines += [f"  replayed: {end}" for end in self.ends]
        for plugin in self.plugins:
            lines += self._plugin_lines(plugin)
        return "\n".join(printable(line) for line in [*lines, *self.notes])

    def _plugin_lines(self, plugin: str) -> list[str]:
        own = [each for each in self.asked if each.request.by == plugin]
        before = [each for each in own if not each.after_end]
        after = [each for each in own if each.after_end]
        lines = [f"{plugin} {_summary(before)}"]
        lines += [f"  {each}" for each in before[:SHOWN]]
        lines += [f"  and {len(before) - SHOWN} more"] * (len(before) > SHOWN)
        if after:
            lines.append(f"  and {count_times(len(after))} more after that end, where the recorded run continued")
            lines += [f"    the first: {after[0]}"] * (not before)  # of settings that are compared, say
        lines += [f"  then it was switched off: {text}" for text in self.unheld.get(plugin, ())]
        lines += [f"  then it failed: {text}" for text in self.failed.get(plugin, ())]
        recorded = [
            (each.attempt, request) for each in self.recorded for request in each.requests if request.by == plugin
        ]
        if recorded and recorded != [(each.attempt, each.request) for each in own]:
            attempt, first = recorded[0]
            number = "one request" if len(recorded) == 1 else f"{len(recorded)} requests, the first"
            lines.append(f"  in the recorded run it made {number}: attempt {attempt}, {_describe(first)}")
        return lines


def _describe(request: Request) -> str:
    where = f"epoch {request.epoch} batch {request.batch} step {request.step}"
    event = f" on {request.event}" if request.event else ""
    times = f" (x{request.times})" if request.times > 1 else ""
    return f"{where}{event}: {request.verb}{times} - {request.reason}"


def _summary(requests: list[ReplayedRequest]) -> str:
    counts = Counter(each.request.verb for each in requests)
    words = ", ".join(f"{verb} {count_times(count)}" for verb, count in counts.items())
    return f"would have requested {words or 'nothing'}"


def count_times(number: int) -> str:
    """Return how often, in words."""
    return "once" if number == 1 else f"{number} times"


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
