"""Kill points: every emission of an event is a moment at which a run can be killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heliograph.events import CATALOGUE
from heliograph.spi import UsageError, is_whole_number, known_names

if TYPE_CHECKING:
    from heliograph import Progress
    from heliograph.events import Event

KillPoint = int | tuple[str, int]
STAGES = ("batch_end", "epoch_start", "validation_batch_end", "gradients_ready", "epoch_end", "batch_start")
AFTER_THE_END = ("run_failed", "run_closed")


@dataclass(frozen=True, slots=True)
class Moment:
    """The emission of an event.

    Attributes:
        event: the name of the event.
        epoch: the finished epochs.
        batch: the finished batches of the epoch.
        number: the number of the emission at these counters, from 1.
    """

    event: str
    epoch: int
    batch: int
    number: int = 1

    def __str__(self) -> str:
        number = f" (number {self.number} there)" if self.number > 1 else ""
        return f"epoch {self.epoch}, batch {self.batch}, in {self.event}{number}"


class MomentCounter:
    """Numbers the emissions of a run, with the same numbers in an uninterrupted and a resumed run."""

    def __init__(self) -> None:
        self._counters = (-1, -1)
        self._counts: Counter[str] = Counter()

    def count(self, event: Event, progress: Progress) -> Moment:
        counters = (progress.epoch, progress.batch)
        if counters != self._counters:
            self._counters = counters
            self._counts.clear()
        self._counts[event.name] += 1
        return Moment(event.name, *counters, self._counts[event.name])


def parse_kill_point(text: str) -> KillPoint:
    event, _, number = text.rpartition(":")
    if not number.isdecimal():
        raise UsageError(
            f"--kill-at must be a batch or an event, for example --kill-at 7 or --kill-at validation_batch_end:3, "
            f"got {text!r}."
        )
    return (event, int(number)) if event else int(number)


def list_kill_points(kill_at: KillPoint | Sequence[KillPoint]) -> list[KillPoint]:
    points: Any = [kill_at] if _is_kill_point(kill_at) else kill_at
    if not isinstance(points, list | tuple) or not points or not all(map(_is_kill_point, points)):
        raise UsageError(
            f"kill_at= must be the number of a batch (7: after the seventh of the run), an event and the number of its "
            f"emission ('validation_batch_end', 3), or a list of these, got {kill_at!r}."
        )
    return [*points]


def find_moment(point: KillPoint, moments: Sequence[Moment]) -> Moment:
    event, number = point if isinstance(point, tuple) else ("batch_end", point)
    emissions = [moment for moment in moments if moment.event == event]
    events = ({kind.name for kind in CATALOGUE} | {moment.event for moment in moments}) - {*AFTER_THE_END}
    if event not in events:
        raise UsageError(f"Unknown event {event!r} in a kill point.{known_names(event, events)}")
    if not 1 <= number <= len(emissions):
        count = f"{len(emissions)} batches" if isinstance(point, int) else f"{len(emissions)} emissions of {event!r}"
        raise UsageError(f"kill_at={point!r} is never reached: the uninterrupted run has {count}, counted from 1.")
    return emissions[number - 1]


def choose_moments(moments: Sequence[Moment], count: int) -> list[Moment]:
    first = next((index for index, moment in enumerate(moments) if moment.event == "save_point"), len(moments)) + 1
    last = max((index for index, moment in enumerate(moments) if moment.event == "batch_end"), default=0) + 1
    ends = [first + (last - first) * part // count for part in range(count + 1)]
    if min(later - earlier for earlier, later in pairwise(ends)) < 1:
        batches = sum(moment.event == "batch_end" for moment in moments)
        raise UsageError(
            f"The run is too short for {count} kills after its first save: it has {batches} batches. Train "
            f"longer, or lower resumes= or save_every=."
        )
    chosen, unused = [], [*STAGES]
    for start, end in pairwise(ends):
        events = {moment.event for moment in moments[start:end]}
        stages = [event for event in unused if event in events][:1]
        unused = [event for event in unused if event not in stages]
        candidates = [moment for moment in moments[start:end] if not stages or moment.event in stages]
        chosen.append(candidates[len(candidates) // 2])
    return chosen


def _is_kill_point(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[0], str) and is_whole_number(value[1])
    return is_whole_number(value)
