"""The moments of a run at which it can be killed: every emission of an event is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heliograph.events import CATALOGUE
from heliograph.spi import UsageError, is_whole_number, known_names

if TYPE_CHECKING:
    from heliograph import Progress
    from heliograph.events import Event

KillPoint = int | tuple[str, int]
Stage = Callable[["Moment"], bool]
AFTER_THE_END = ("run_failed", "run_closed")


@dataclass(frozen=True, slots=True)
class Moment:
    """The emission of an event.

    Attributes:
        event: the event's name.
        epoch: finished epochs.
        batch: finished batches of the epoch.
        number: counts the event's emissions at these counters, from 1.
    """

    event: str
    epoch: int
    batch: int
    number: int = 1

    def __str__(self) -> str:
        number = f" (number {self.number} there)" if self.number > 1 else ""
        return f"epoch {self.epoch}, batch {self.batch}, in {self.event}{number}"


class MomentCounter:
    """Numbers the emissions of a run; the numbers are the same in an uninterrupted and a resumed run."""

    def __init__(self) -> None:
        self._at = (-1, -1)
        self._counts: Counter[str] = Counter()

    def count(self, event: Event, progress: Progress) -> Moment:
        """Return the moment of an emission."""
        at = (progress.epoch, progress.batch)
        if at != self._at:
            self._at = at
            self._counts.clear()
        self._counts[event.name] += 1
        return Moment(event.name, *at, self._counts[event.name])


def parse_kill_point(text: str) -> KillPoint:
    """Return the kill point of a command-line argument, `7` or `validation_batch_end:3`.

    Raises:
        UsageError: it is neither a number nor an event with a number.
    """
    event, _, number = text.rpartition(":")
    if not number.isdecimal():
        raise UsageError(
            f"A run is killed after a batch or at an event, as in --kill-at 7 or --kill-at validation_batch_end:3; "
            f"got {text!r}."
        )
    return (event, int(number)) if event else int(number)


def list_kill_points(kill_at: KillPoint | Sequence[KillPoint]) -> list[KillPoint]:
    """Return one or several kill points as a list.

    Raises:
        UsageError: something is not a kill point.
    """
    points: Any = [kill_at] if _is_kill_point(kill_at) else kill_at
    if not isinstance(points, list | tuple) or not points or not all(map(_is_kill_point, points)):
        raise UsageError(
            f"kill_at= takes the number of a batch (7: after the seventh of the run), an event and which of its "
            f"emissions ('validation_batch_end', 3), or a list of these for kills in a row; got {kill_at!r}."
        )
    return [*points]


def find_moment(point: KillPoint, moments: Sequence[Moment]) -> Moment:
    """Return the moment of a kill point.

    Raises:
        UsageError: there is no such event, or the run ends before.
    """
    event, number = point if isinstance(point, tuple) else ("batch_end", point)
    own = [moment for moment in moments if moment.event == event]
    known = ({kind.name for kind in CATALOGUE} | {moment.event for moment in moments}) - {*AFTER_THE_END}
    if event not in known:
        raise UsageError(f"There is no event {event!r} to kill a run at.{known_names(event, known)}")
    if not 1 <= number <= len(own):
        count = f"{len(own)} batches" if isinstance(point, int) else f"{len(own)} emissions of {event!r}"
        raise UsageError(f"kill_at={point!r} is never reached: the uninterrupted run has {count}, counted from 1.")
    return own[number - 1]


def choose_moments(moments: Sequence[Moment], count: int) -> list[Moment]:
    """Return moments to kill a run at, spread over the run and its stages; always the same.

    Raises:
        UsageError: the run is too short.
    """
    first = next((index for index, each in enumerate(moments) if each.event == "save_point"), len(moments)) + 1
    last = max((index for index, each in enumerate(moments) if each.event == "batch_end"), default=0) + 1
    ends = [first + (last - first) * part // count for part in range(count + 1)]
    if min(later - earlier for earlier, later in pairwise(ends)) < 1:
        batches = sum(each.event == "batch_end" for each in moments)
        raise UsageError(
            f"The run is too short to be killed {count} times after a first save: it has {batches} batches. Train "
            f"longer, or lower resumes= or save_every=."
        )
    unused: list[Stage] = []
    chosen = []
    for start, end in pairwise(ends):
        part = moments[start:end]
        unused = unused or list(STAGES)
        stage = next((fits for fits in unused if any(map(fits, part))), None)
        candidates = part if stage is None else [*filter(stage, part)]
        unused = [fits for fits in unused if fits is not stage]
        chosen.append(candidates[len(candidates) // 2])
    return chosen


def _is_kill_point(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[0], str) and is_whole_number(value[1])
    return is_whole_number(value)


STAGES: tuple[Stage, ...] = (
    lambda each: each.event == "batch_end",
    lambda each: each.event == "epoch_start",
    lambda each: each.event == "validation_batch_end",
    lambda each: each.event == "gradients_ready",
    lambda each: each.event == "epoch_end",
    lambda each: each.event == "batch_start" and each.batch == 0,
)
