"""What a replay found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ....core.system.extras import printable
from ....events import Request
from ....events.catalogue import Status

SHOWN = 20  # requests of one plugin, in full
DID = {True: "the run did so", False: "the run did not", None: ""}


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that a replayed plugin made.

    Attributes:
        attempt: in which attempt of the run, from 1.
        request: what was asked, by whom, why, where, and on which event.
        did: whether the recording shows that the run did so, whoever asked it to; None where it does not tell.
        behind_end: whether the run would have ended, or failed, before.
    """

    attempt: int
    request: Request
    did: bool | None
    behind_end: bool

    def __str__(self) -> str:
        known = f" ({DID[self.did]})" if DID[self.did] else ""
        return f"attempt {self.attempt}, {_told(self.request)}{known}"


@dataclass(frozen=True, slots=True)
class Ending:
    """Where an attempt would have ended before its time, or as it did.

    Attributes:
        attempt: which, from 1.
        by: the plugin that ends it.
        reason: why it asks for the stop; or the error that it raises, with the event.
        is_failure: whether it raises.
        epoch: finished epochs there.
        batch: micro-batches consumed in the current one.
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
        place = f"epoch {self.epoch}, batch {self.batch}, step {self.step}"
        too = {True: "as it did", False: "the recorded run went on", None: "it was killed there"}[self.did]
        return f"attempt {self.attempt} would have ended at {place}, {how} by {self.by}: {self.reason} ({too})"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recording itself shows of an attempt.

    Attributes:
        attempt: which, from 1.
        status: how it ended; None where it was killed, or goes on.
        reason: why, as far as it was told.
        epoch: finished epochs at its end.
        batch: micro-batches consumed in the current one.
        step: optimizer steps done.
        requests: what the plugins of the replayed names asked then.
    """

    attempt: int
    status: Status | None
    reason: str
    epoch: int
    batch: int
    step: int
    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return self.told(is_last=True)

    def told(self, *, is_last: bool) -> str:
        """Return it as a sentence.

        Args:
            is_last: whether no other attempt followed; one that another followed cannot go on.
        """
        how = self.status or ("killed, or goes on," if is_last else "killed")
        place = f"epoch {self.epoch}, batch {self.batch}, step {self.step}"
        why = f": {self.reason}" if self.reason else ""
        return f"attempt {self.attempt} was {how} at {place}{why}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What plugins would have asked of a recorded run; `str` tells it to people.

    Attributes:
        recording: the file.
        plugins: the names of the replayed plugins.
        asked: their requests, in order; one that was made again and again is there once, with `times`.
        recorded: what the recording shows, attempt by attempt.
        ends: where the attempts would have ended by the replayed plugins' will, at most one of each attempt.
        unheld: by plugin, what it needed and the recording does not hold, and where; it was switched off from there on.
        failed: by plugin, the errors that its handlers raised, and where.
        notes: what else there is to know.
    """

    recording: Path
    plugins: tuple[str, ...]
    asked: tuple[Asking, ...]
    recorded: tuple[Recorded, ...]
    ends: tuple[Ending, ...]
    unheld: dict[str, tuple[str, ...]]
    failed: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    def requests(self, plugin: str) -> list[Request]:
        """Return what a replayed plugin asked, in order."""
        return [asking.request for asking in self.asked if asking.request.by == plugin]

    def __str__(self) -> str:
        lines = [f"replay of {self.recording} with {', '.join(self.plugins) or 'no plugin'}"]
        lines += [f"  recorded: {each.told(is_last=each is self.recorded[-1])}" for each in self.recorded]
        lines += [f"  replayed: {end}" for end in self.ends]
        for plugin in self.plugins:
            lines += self._of_plugin(plugin)
        return "\n".join(printable(line) for line in [*lines, *self.notes])

    def _of_plugin(self, plugin: str) -> list[str]:
        asked = [asking for asking in self.asked if asking.request.by == plugin]
        before = [asking for asking in asked if not asking.behind_end]
        behind = [asking for asking in asked if asking.behind_end]
        lines = [f"{plugin} {_summary(before)}"]
        lines += [f"  {asking}" for asking in before[:SHOWN]]
        lines += [f"  and {len(before) - SHOWN} more"] * (len(before) > SHOWN)
        if behind:
            lines.append(f"  and {_times(len(behind))} more behind the end, where the recorded run went on")
            lines += [f"    the first: {behind[0]}"] * (not before)  # of settings that are compared, say
        lines += [f"  then it was told: {text}" for text in self.unheld.get(plugin, ())]
        lines += [f"  then it failed: {text}" for text in self.failed.get(plugin, ())]
        recorded = [
            (each.attempt, request) for each in self.recorded for request in each.requests if request.by == plugin
        ]
        if recorded and recorded != [(asking.attempt, asking.request) for asking in asked]:
            attempt, first = recorded[0]
            number = "once" if len(recorded) == 1 else f"{len(recorded)} times, first"
            lines.append(f"  the one in the run asked {number}: attempt {attempt}, {_told(first)}")
        return lines


def _told(request: Request) -> str:
    """Return where and on which event something was asked, what, and why."""
    place = f"epoch {request.epoch} batch {request.batch} step {request.step}"
    event = f" on {request.event}" if request.event else ""
    times = f" (x{request.times})" if request.times > 1 else ""
    return f"{place}{event}: {request.verb}{times} - {request.reason}"


def _summary(asked: list[Asking]) -> str:
    """Return how often a plugin asked for what."""
    counts = Counter(asking.request.verb for asking in asked)
    words = ", ".join(f"{verb} {_times(count)}" for verb, count in counts.items())
    return f"would have asked for {words or 'nothing'}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
