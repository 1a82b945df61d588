"""Moments of a run: every emission of an event is one, and a run can be killed at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heliograph.events import CATALOGUE
from heliograph.events.checks import known_names
from heliograph.testing.resume.errors import UsageError

if TYPE_CHECKING:
    from heliograph.events import Event, Progress

Position = int | tuple[str, int]
Stage = Callable[["Moment"], bool]
AFTER_THE_END = ("run_failed", "run_closed")


@dataclass(frozen=True, slots=True)
class Moment:
    """The emission of an event.

    Attributes:
        event: the event's name.
        epoch: finished epochs.
        batch: finished batches of the epoch.
        again: how often the event had been emitted at this very place of the run, itself included.
    """

    event: str
    epoch: int
    batch: int
    again: int = 1

    def __str__(self) -> str:
        again = f" (number {self.again} there)" if self.again > 1 else ""
        return f"epoch {self.epoch}, batch {self.batch}, in {self.event}{again}"


class Clock:
    """Tells the moments of a run; the same in an uninterrupted run and in a resumed one."""

    def __init__(self) -> None:
        self._place = (-1, -1)
        self._counts: Counter[str] = Counter()

    def tell(self, event: Event, progress: Progress) -> Moment:
        """Return the moment of an emission."""
        place = (progress.epoch, progress.batch)
        if place != self._place:
            self._place = place
            self._counts.clear()
        self._counts[event.name] += 1
        return Moment(event.name, *place, self._counts[event.name])


def parse(text: str) -> Position:
    """Return the position that a word of the command line names, `7` or `validation_batch_end:3`.

    Raises:
        UsageError: it is of neither form.
    """
    event, _, number = text.rpartition(":")
    if not number.isdecimal():
        raise UsageError(
            f"A run is killed after a batch or at an event, as in --kill-at 7 or --kill-at validation_batch_end:3; "
            f"got {text!r}."
        )
    return (event, int(number)) if event else int(number)


def listed(kill_at: Position | Sequence[Position]) -> list[Position]:
    """Return positions as a list.

    Raises:
        UsageError: something is no position.
    """
    positions: Any = [kill_at] if _is_position(kill_at) else kill_at
    if not isinstance(positions, list | tuple) or not positions or not all(map(_is_position, positions)):
        raise UsageError(
            f"kill_at= takes the number of a batch (7: after the seventh of the run), an event and which of its "
            f"emissions ('validation_batch_end', 3), or a list of these for kills in a row; got {kill_at!r}."
        )
    return [*positions]


def located(position: Position, moments: Sequence[Moment]) -> Moment:
    """Return the moment of a run that a position names.

    Raises:
        UsageError: there is no such event, or the position never comes.
    """
    event, number = position if isinstance(position, tuple) else ("batch_end", position)
    own = [moment for moment in moments if moment.event == event]
    known = ({kind.name for kind in CATALOGUE} | {moment.event for moment in moments}) - {*AFTER_THE_END}
    if event not in known:
        raise UsageError(f"There is no event {event!r} to kill a run at.{known_names(event, known)}")
    if not 1 <= number <= len(own):
        count = f"{len(own)} batches" if isinstance(position, int) else f"{len(own)} emissions of {event!r}"
        raise UsageError(f"kill_at={position!r} never comes: the uninterrupted run has {count}, counted from 1.")
    return own[number - 1]


def chosen(moments: Sequence[Moment], count: int) -> list[Moment]:
    """Return moments to kill a run at, spread over it and over its stages, always the same ones.

    Raises:
        UsageError: the run is too short.
    """
    first = next((index for index, each in enumerate(moments) if each.event == "save_point"), len(moments)) + 1
    last = max((index for index, each in enumerate(moments) if each.event == "batch_end"), default=0) + 1
    ends = [first + (last - first) * part // count for part in range(count + 1)]
    if min(later - earlier for earlier, later in pairwise(ends)) < 1:
        batches = sum(each.event == "batch_end" for each in moments)
        raise UsageError(
            f"The run is too short to be killed {count} times behind a first save: it has {batches} batches. Train "
            f"longer, or lower resumes= or save_every=."
        )
    unused: list[Stage] = []
    picked = []
    for start, end in pairwise(ends):
        part = moments[start:end]
        unused = unused or list(STAGES)
        stage = next((fits for fits in unused if any(map(fits, part))), None)
        candidates = part if stage is None else [*filter(stage, part)]
        unused = [fits for fits in unused if fits is not stage]
        picked.append(candidates[len(candidates) // 2])
    return picked


def _is_position(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[0], str) and _is_number(value[1])
    return _is_number(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


STAGES: tuple[Stage, ...] = (
    lambda each: each.event == "batch_end",
    lambda each: each.event == "epoch_start",
    lambda each: each.event == "validation_batch_end",
    lambda each: each.event == "gradients_ready",
    lambda each: each.event == "epoch_end",
    lambda each: each.event == "batch_start" and each.batch == 0,
)
