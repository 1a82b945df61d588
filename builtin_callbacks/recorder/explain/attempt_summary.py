"""The attempts of a recording as the legs of one way: how long each took, and where it returned to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from ..format.records import TIMED, Attempt, Batches, Counters, EventEntry, Recording, TimesEntry


@dataclass(frozen=True, slots=True)
class Return:
    """A run took its state from a checkpoint.

    Attributes:
        path: the checkpoint, None where it came of no file.
        clock: when, in seconds since the attempt began.
        counters: where it goes on.
        left: how far it had come before, None where nothing of that is recorded.
        is_roll_back: whether it returned amid an attempt.
    """

    path: str | None
    clock: float
    counters: Counters
    left: Counters | None
    is_roll_back: bool

    def again(self) -> Counters | None:
        """Return how much is done again, as counters; None where it is nothing."""
        left, counters = self.left, self.counters
        if left is None or left.batches <= counters.batches:
            return None
        return Counters(
            batch=left.batches - counters.batches,
            steps=max(0, left.steps - counters.steps),
            samples=max(0, left.samples - counters.samples),
            seconds=max(0.0, left.seconds - counters.seconds),
        )


@dataclass(frozen=True)
class Leg:
    """One attempt.

    Attributes:
        number: from 1.
        attempt: what was recorded.
        began: when, in UTC; None where that could not be read.
        seconds: from its beginning to the last that is recorded of it.
        last: where it was then.
        returns: the checkpoints that it went on from.
        is_last: whether no other came behind.
    """

    number: int
    attempt: Attempt
    began: datetime | None
    seconds: float
    last: Counters
    returns: tuple[Return, ...]
    is_last: bool

    @property
    def is_fit(self) -> bool:
        """Whether it was a training."""
        return self.attempt.phase == "train"

    @cached_property
    def ending(self) -> EventEntry | None:
        """Its `run_closed`, None where it was killed, or goes on."""
        return next((entry for entry in reversed(self._happened) if entry.event == "run_closed"), None)

    @cached_property
    def timed(self) -> float:
        """Its clock when the last times of its handlers were written; 0 where it left none."""
        clock = timed = 0.0
        for entry in self.attempt.entries:
            if isinstance(entry, TimesEntry):
                timed = clock
            elif isinstance(entry, TIMED):
                clock = max(clock, entry.clock)
        return timed

    @cached_property
    def _happened(self) -> tuple[EventEntry, ...]:
        return tuple(entry for entry in self.attempt.entries if isinstance(entry, EventEntry))

    def happenings(self, *names: str) -> Iterator[EventEntry]:
        """Yield what happened in it, or only the events of these names."""
        return (entry for entry in self._happened if not names or entry.event in names)

    @property
    def begun(self) -> str:
        """When it began, for people."""
        return "at a time that could not be read" if self.began is None else f"{self.began:%Y-%m-%d %H:%M:%S} UTC"

    def gap(self, before: Leg) -> float | None:
        """Return the seconds between the end of the attempt before and the beginning of this one, if they are known."""
        if self.began is None or before.began is None:
            return None
        return max(0.0, (self.began - before.began).total_seconds() - before.seconds)

    @property
    def status(self) -> str:
        """How it ended, in a word or two."""
        if self.ending is None:
            return "killed, or still going on" if self.is_last else "killed"
        return str(self.ending.data["status"])


def legs(recording: Recording) -> list[Leg]:
    """Return the attempts of a recording with what can be said of each as a whole.

    Raises:
        ValueError: it holds none.
    """
    if not recording.attempts:
        raise ValueError(f"{recording.path} holds no attempt: the run was killed before anything was recorded.")
    found: list[Leg] = []
    left: Counters | None = None
    for index, attempt in enumerate(recording.attempts):
        returns, last, clock = _walked(attempt, left if attempt.phase == "train" else None)
        is_last = index == len(recording.attempts) - 1
        found.append(Leg(index + 1, attempt, _moment(attempt.began), clock, last, tuple(returns), is_last))
        if attempt.phase == "train" and (last != Counters() or returns):
            left = last
    return found


def main_leg(found: list[Leg]) -> Leg:
    """Return the one whose end is that of the run: the last training, else the last of all."""
    return next((leg for leg in reversed(found) if leg.is_fit), found[-1])


def run_name(found: list[Leg]) -> str:
    """Return the run's name."""
    return next((leg.attempt.run for leg in found if leg.attempt.run), "a run whose name could not be read")


def _walked(attempt: Attempt, left: Counters | None) -> tuple[list[Return], Counters, float]:
    """Return where an attempt returned to, where it was last, and its clock then."""
    returns: list[Return] = []
    at: EventEntry | Batches | None = None
    clock, is_underway = 0.0, False
    for entry in attempt.entries:
        if isinstance(entry, Batches):
            at, clock, is_underway = entry, entry.clock, True
        elif isinstance(entry, EventEntry):
            clock = max(clock, entry.clock)
            if entry.event == "checkpoint_loaded":
                before = _place(at) if is_underway else left
                returns.append(Return(entry.data["path"], entry.clock, entry.counters, before, is_underway))
                is_underway = True
            elif entry.event == "epoch_start":
                is_underway = True
            at = entry
    return returns, _place(at), clock


def _place(at: EventEntry | Batches | None) -> Counters:
    """Return where a run was after an entry, or before all of them."""
    if at is None:
        return Counters()
    return at.last if isinstance(at, Batches) else at.counters


def _moment(text: str) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
