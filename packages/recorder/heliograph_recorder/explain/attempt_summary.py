"""Summarize the attempts of a recording: duration, end, the checkpoints that they loaded, and the parents of a fork."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import PurePath
from typing import Any

from heliograph.spi import printable

from ..format.records import TIMED, AttemptRecord, Batches, Counters, EventEntry, Recording, TimesEntry, key_of

PARENT, CHANGE = "forked_from", "fork_change"  # hyper-parameters of a fork
BETWEEN = " at step "  # in the value of PARENT, between the parent's recording and the step


@dataclass(frozen=True, slots=True)
class Restore:
    """A saved state was loaded: the run resumed or rolled back.

    Attributes:
        path: the checkpoint, None if the state was not loaded from a file.
        clock: seconds between the beginning of the attempt and the load.
        counters: the counters at which the run continues.
        before: the counters that the run had reached before, None if that is not recorded.
        is_roll_back: whether the attempt had already trained.
    """

    path: str | None
    clock: float
    counters: Counters
    before: Counters | None
    is_roll_back: bool

    def lost_work(self) -> Counters | None:  # that has to be repeated
        before, counters = self.before, self.counters
        if before is None or before.batches <= counters.batches:
            return None
        return Counters(
            batch=before.batches - counters.batches,
            steps=max(0, before.steps - counters.steps),
            samples=max(0, before.samples - counters.samples),
            seconds=max(0.0, before.seconds - counters.seconds),
        )


@dataclass(frozen=True)
class AttemptSummary:
    """One attempt.

    Attributes:
        number: the number of the attempt, from 1.
        attempt: its record.
        began: its beginning in UTC; None if it is unreadable.
        seconds: the time from its beginning to its last entry.
        last: the counters at its last entry.
        restores: the states that it loaded.
        is_last: whether it is the last attempt of the recording.
        is_running: whether its process is running, None if unknown.
        resumed_at: the earliest position from which a later attempt continued; the work after it is lost.
    """

    number: int
    attempt: AttemptRecord
    began: datetime | None
    seconds: float
    last: Counters
    restores: tuple[Restore, ...]
    is_last: bool
    is_running: bool | None = None
    resumed_at: Counters | None = None

    @property
    def is_fit(self) -> bool:
        return self.attempt.phase == "train"

    @cached_property
    def ending(self) -> EventEntry | None:  # None if the attempt was killed or is still running
        return next((entry for entry in reversed(self._events) if entry.event == "run_closed"), None)

    @cached_property
    def switched_off(self) -> EventEntry | None:
        """The change that switched its recorder off, unless the recorder was switched on again."""
        last = next(reversed(self._events), None)
        return last if last is not None and last.data.get("ends_recording") is True else None

    @property
    def warnings(self) -> list[str]:
        return [] if self.ending is None else list(self.ending.data["warnings"])

    @cached_property
    def timed_seconds(self) -> float:
        """The attempt's clock at the last `TimesEntry`; 0 without one."""
        clock = timed = 0.0
        for entry in self.attempt.entries:
            if isinstance(entry, TimesEntry):
                timed = clock
            elif isinstance(entry, TIMED):
                clock = max(clock, entry.clock)
        return timed

    @cached_property
    def _events(self) -> tuple[EventEntry, ...]:
        return tuple(entry for entry in self.attempt.entries if isinstance(entry, EventEntry))

    def events(self, *names: str) -> Iterator[EventEntry]:
        return (entry for entry in self._events if not names or entry.event in names)

    def has_lost(self, counters: Counters) -> bool:
        return self.resumed_at is not None and key_of(counters) > key_of(self.resumed_at)

    @property
    def loss(self) -> str:  # of work
        if self.ending is None:
            return "lost in the kill"
        return {"failed": "lost in the failure", "interrupted": "lost in the interruption"}.get(self.status, "lost")

    @property
    def began_text(self) -> str:
        return "at an unreadable time" if self.began is None else f"{self.began:%Y-%m-%d %H:%M:%S} UTC"

    def gap(self, previous: AttemptSummary) -> float | None:
        if self.began is None or previous.began is None:
            return None
        return max(0.0, (self.began - previous.began).total_seconds() - previous.seconds)

    @property
    def status(self) -> str:
        if self.ending is None and (off := self.switched_off) is not None:
            prefix = "running" if self.is_running and self.is_last else "not recorded to the end"
            change, by = off.data["change"], printable(off.data["by"])
            return f"{prefix}; the recorder was {change} by {by} at step {off.counters.steps:,}"
        if self.ending is None:
            states = {None: "killed, or still running", True: "running", False: "killed"}
            return states[self.is_running] if self.is_last else "killed"
        return str(self.ending.data["status"])


def summarize_attempts(recording: Recording, *, is_running: bool | None = None) -> list[AttemptSummary]:
    if not recording.attempts:
        raise ValueError(f"{recording.path} has no attempt: the run was killed before anything was recorded.")
    attempts: list[AttemptSummary] = []
    trained: Counters | None = None  # the last counters of the previous training
    for index, attempt in enumerate(recording.attempts):
        is_fit = attempt.phase == "train"
        restores, last, clock = _read_progress(attempt, trained if is_fit else None)
        is_last = index == len(recording.attempts) - 1
        began = datetime.fromisoformat(attempt.began) if attempt.began else None
        attempts.append(AttemptSummary(index + 1, attempt, began, clock, last, tuple(restores), is_last, is_running))
        if is_fit and (last != Counters() or restores):
            trained = last
    origin: Counters | None = None  # the earliest position from which a later attempt resumed
    for index, summary in reversed([*enumerate(attempts)]):
        if summary.is_fit:
            attempts[index] = replace(summary, resumed_at=origin)
            origins = [restore.counters for restore in summary.restores if not restore.is_roll_back]
            origin = min([*origins, *([] if origin is None else [origin])], key=key_of, default=None)
    return attempts


def main_attempt(attempts: list[AttemptSummary]) -> AttemptSummary:
    """Return the attempt whose end is the end of the run: the last training, otherwise the last of all."""
    return next((attempt for attempt in reversed(attempts) if attempt.is_fit), attempts[-1])


def all_warnings(attempts: Iterable[AttemptSummary]) -> list[str]:
    return list(dict.fromkeys(warning for attempt in attempts for warning in attempt.warnings))


def all_notes(attempts: Sequence[AttemptSummary]) -> list[str]:
    notes = [
        (attempt.number, note)
        for attempt in attempts
        if attempt.ending is not None
        for note in attempt.ending.data["notes"]
    ]
    return [f"attempt {number}: {note}" if len(attempts) > 1 else note for number, note in notes]


def run_name(attempts: list[AttemptSummary]) -> str:
    names = (summary.attempt.run for summary in attempts if summary.attempt.run)
    return next(names, "a run with an unreadable name")


def _read_progress(attempt: AttemptRecord, trained: Counters | None) -> tuple[list[Restore], Counters, float]:
    restores: list[Restore] = []
    last = Counters()
    clock, has_begun = 0.0, False
    for entry in attempt.entries:
        if isinstance(entry, Batches):
            last, clock, has_begun = entry.last, entry.clock, True
        elif isinstance(entry, EventEntry):
            clock = max(clock, entry.clock)
            if entry.event == "checkpoint_loaded":
                before = last if has_begun else trained
                restores.append(Restore(entry.data["path"], entry.clock, entry.counters, before, has_begun))
            has_begun = has_begun or entry.event in ("checkpoint_loaded", "epoch_start")
            last = entry.counters
    return restores, last, clock


@dataclass(frozen=True, slots=True)
class Parent:
    """The parent of a fork.

    Attributes:
        recording: the path of the parent's recording when the fork began; empty if unknown.
        step: the optimizer step after which the fork differs from it.
        change: the function that changed the fork; empty without one, and for the parent of a parent.
    """

    recording: str
    step: int
    change: str = ""

    @property
    def name(self) -> str:  # without folder and suffix
        return PurePath(self.recording).stem

    @property
    def parting(self) -> str:
        return f"at step {self.step}" + f", changed by {self.change}" * bool(self.change)


def ancestors(first: AttemptRecord) -> list[Parent]:
    """Return the parent of a training, the parent's parent and so on; `first` is the first attempt of the training."""
    loads = (entry for entry in first.entries if isinstance(entry, EventEntry) and entry.event == "checkpoint_loaded")
    loaded = next(loads, None)
    parents = list(_chain(loaded.data.get("forked_from")) if loaded is not None else ()) or _from_start(first)
    change = first.hyper_parameters.get(CHANGE)
    if parents and isinstance(change, str):
        parents[0] = replace(parents[0], change=change.rpartition("<locals>.")[2])
    return parents


def parting_clock(first: AttemptRecord, step: int) -> float:
    """Return the seconds from the beginning of a fork's first attempt to a step; 0 if the fork began later."""
    timed = [entry for entry in first.entries if isinstance(entry, TIMED)]
    places = [entry.counters if isinstance(entry, EventEntry) else entry.last for entry in timed]
    clocks = [entry.clock for entry, place in zip(timed, places, strict=True) if place.steps <= step]
    return max(clocks, default=0.0)


def _chain(parent: Any) -> Iterator[Parent]:
    while isinstance(parent, Mapping):
        yield Parent(parent["recording"], parent["step"])
        parent = parent.get("forked_from")


def _from_start(first: AttemptRecord) -> list[Parent]:
    """Return the parent of a fork without a checkpoint, from a hyper-parameter."""
    parent = first.hyper_parameters.get(PARENT)
    recording, between, step = parent.rpartition(BETWEEN) if isinstance(parent, str) else ("", "", "")
    return [Parent(recording, int(step))] if between and step.isascii() and step.isdecimal() else []
