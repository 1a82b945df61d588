"""The result of a replay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from heliograph.events import Request
from heliograph.spi import printable

from ..explain.attempt_summary import AttemptSummary
from ..explain.requests import requests_of

SHOWN = 20  # requests of one plugin


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """Describe a request of a replayed plugin.

    Attributes:
        attempt: the number of the attempt, from 1.
        request: the request.
        after_end: whether the run would have ended, or failed, before the request.
    """

    attempt: int
    request: Request
    after_end: bool

    def __str__(self) -> str:
        return f"attempt {self.attempt}, {_describe(self.request)}"


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
class Replayed:
    """Hold the result of a replay; `str` returns a readable report.

    Attributes:
        recording: the file.
        plugins: the names of the replayed plugins.
        asked: their requests in order; a repeated request is listed once, with `times`.
        recorded: the recorded attempts: their number, status and last counters.
        ends: where the replayed plugins would have ended the attempts, at most one entry for each attempt.
        unheld: by plugin, the unrecorded data that it needed, with the position at which it was switched off.
        failed: by plugin, the errors that its handlers raised, with their position.
        notes: other remarks.
    """

    recording: Path
    plugins: tuple[str, ...]
    asked: list[ReplayedRequest] = field(default_factory=list)
    recorded: list[AttemptSummary] = field(default_factory=list)
    ends: list[ReplayEnding] = field(default_factory=list)
    unheld: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def requests(self, plugin: str) -> list[Request]:
        """Return the requests of a replayed plugin, in order."""
        return [replayed.request for replayed in self.asked if replayed.request.by == plugin]

    def recorded_requests(self, plugin: str) -> list[tuple[int, Request]]:
        """Return the requests of a plugin in the recorded run, in order, with the numbers of their attempts."""
        outcomes = [outcome for attempt in self.recorded for outcome in requests_of(attempt)]
        return [(outcome.attempt, outcome.request) for outcome in outcomes if outcome.request.by == plugin]

    def __str__(self) -> str:
        lines = [f"replay of {self.recording} with {', '.join(self.plugins) or 'no plugin'}"]
        lines += [f"  recorded: {_describe_attempt(attempt)}" for attempt in self.recorded]
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
        recorded = self.recorded_requests(plugin)
        if recorded and recorded != [(request.attempt, request.request) for request in replayed]:
            attempt, first = recorded[0]
            number = "one request" if len(recorded) == 1 else f"{len(recorded)} requests, the first"
            lines.append(f"  in the recorded run it made {number}: attempt {attempt}, {_describe(first)}")
        return lines


def _describe_attempt(attempt: AttemptSummary) -> str:
    place = f"epoch {attempt.last.epoch}, batch {attempt.last.batch}, step {attempt.last.steps}"
    reason = "" if attempt.ending is None else f": {attempt.ending.data['reason']}"
    return f"attempt {attempt.number} was {attempt.status} at {place}{reason}"


def _describe(request: Request) -> str:
    place = f"epoch {request.epoch} batch {request.batch} step {request.step}"
    event = f" on {request.event}" if request.event else ""
    times = f" (x{request.times})" if request.times > 1 else ""
    return f"{place}{event}: {request.verb}{times} - {request.reason}"


def count_times(number: int) -> str:
    """Return `once` or `3 times`."""
    return "once" if number == 1 else f"{number} times"
