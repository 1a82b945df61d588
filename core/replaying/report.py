"""What a replay found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...events import Request
from ...events.catalogue import Status

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
        event = f" on {self.request.event}" if self.request.event else ""
        known = f" ({DID[self.did]})" if DID[self.did] else ""
        return f"attempt {self.attempt}, {self.request}{event}{known}"


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
        place = f"epoch {self.epoch} batch {self.batch} step {self.step}"
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
        place = f"epoch {self.epoch} batch {self.batch} step {self.step}"
        why = f": {self.reason}" if self.reason else ""
        return f"attempt {self.attempt} was {self.status or 'killed, or goes on,'} at {place}{why}"


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
        for plugin in self.plugins:
            lines += self._of_plugin(plugin)
        lines += [str(end) for end in self.ends]
        lines += [str(each) for each in self.recorded]
        return "\n".join([*lines, *self.notes])

    def _of_plugin(self, plugin: str) -> list[str]:
        asked = [asking for asking in self.asked if asking.request.by == plugin]
        lines = [f"{plugin} {_summary(asked)}"]
        lines += [f"  {asking}" for asking in asked[:SHOWN]]
        lines += [f"  and {len(asked) - SHOWN} more"] * (len(asked) > SHOWN)
        lines += [f"  then it was told: {text}" for text in self.unheld.get(plugin, ())]
        lines += [f"  then it failed: {text}" for text in self.failed.get(plugin, ())]
        recorded = [f"attempt {each.attempt}, {request}" for each in self.recorded for request in each.requests if request.by == plugin]  # fmt: skip  # noqa: E501
        if recorded and recorded != [f"attempt {asking.attempt}, {asking.request}" for asking in asked]:
            lines.append(f"  the one in the run asked {_times(len(recorded))}, first: {recorded[0]}")
        return lines


def _summary(asked: list[Asking]) -> str:
    """Return how often a plugin asked for what."""
    if not asked:
        return "would have asked for nothing"
    counts = Counter(asking.request.verb for asking in asked)
    words = ", ".join(f"{verb} {_times(count)}" for verb, count in counts.items())
    behind = sum(asking.behind_end for asking in asked)
    return f"would have asked for {words}" + f"; {behind} of these behind the end of the run" * bool(behind)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
