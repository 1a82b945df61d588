"""One attempt of a check: a run that is watched, may begin at a saved state, and may be killed."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from heliograph import Lane, Run, SavePoint, Streams, Trainer
from heliograph.events import CATALOGUE, Event, Position
from heliograph.spi import Fact, Tracer

from .moments import AFTER_THE_END, Moment, MomentCounter
from .suspects import worker_suspects

BY = "the resume check"


class Killed(BaseException):
    """Ends an attempt as abruptly as possible within a process."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state that an attempt saved, as it would be on a disk.

    Attributes:
        content: the bytes.
        facts: how many facts an uninterrupted run has up to there.
        counters: finished epochs, finished batches of the epoch, and steps.
        path: the newest checkpoint that the run itself had written by then, if any.
    """

    content: bytes
    facts: int
    counters: tuple[int, int, int]
    path: Path | None


@dataclass(slots=True)
class CheckedAttempt:
    """What an attempt did.

    Attributes:
        origin: the state that it resumed, None if it began at the start.
        facts: what it is compared by.
        moments: where it could have been killed.
        killed: whether it was killed.
        resumed_by_itself: whether it resumed a checkpoint that the check did not give it.
        saved: the newest state that it saved.
        workers: what may make the loader's workers differ.
        position: how the data reach their position.
        reasons: what the run itself reports that may make a resume differ.
    """

    origin: SavedState | None
    facts: list[Fact] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    killed: bool = False
    resumed_by_itself: bool = False
    saved: SavedState | None = None
    workers: tuple[str, ...] = ()
    position: Position = "seeked"
    reasons: tuple[str, ...] = ()

    @property
    def fact_count(self) -> int:
        """How many facts an uninterrupted run has up to now."""
        return len(self.facts) + (self.origin.facts if self.origin else 0)


def run_attempt(
    trainer: Trainer,
    options: Mapping[str, Any],
    *,
    save_every: int,
    origin: SavedState | None = None,
    kill: Moment | None = None,
) -> CheckedAttempt:
    """Train, from a saved state or the start, to the end or until killed; return what happened.

    Args:
        trainer: of this attempt only.
        options: of its `fit`.
        save_every: batches between the save points that are requested; at the end of an epoch there is one too.
        origin: the state to resume.
        kill: when to kill it.
    """
    attempt = CheckedAttempt(origin)
    Tracer(attempt.facts.append).subscribe(trainer.bus)
    Watcher(attempt, trainer, save_every, kill).subscribe()
    try:
        trainer.fit(**{**options, "on_interrupt": "raise"})
    except BaseException as error:
        if not isinstance(error, Killed) and not isinstance(error.__cause__, Killed):
            raise
    if attempt.killed:
        gc.collect()  # a killed run is in reference cycles, and so are its loader's worker processes
    return attempt


class Watcher:
    """Kills an attempt at its moment, after all other handlers; requests saves, and keeps what they would hold."""

    def __init__(self, attempt: CheckedAttempt, trainer: Trainer, save_every: int, kill: Moment | None) -> None:
        self._attempt, self._trainer, self._save_every, self._kill_at = attempt, trainer, save_every, kill
        self._counter = MomentCounter()

    def subscribe(self) -> None:
        """Subscribe to all events."""
        bus = self._trainer.bus
        for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())]):
            bus.on(event, self.handle, lane=Lane.REPORT)
        bus.on(SavePoint, self.save, lane=Lane.PERSIST)

    def handle(self, run: Run, event: Event) -> None:
        """Request saves, and kill the run at its moment."""
        react = getattr(self, f"_at_{event.name}", None)
        if react is not None:
            react(run, event)
        if event.name in AFTER_THE_END:
            return
        moment = self._counter.count(event, run.progress)
        self._attempt.moments.append(moment)
        if moment == self._kill_at:
            self._kill(run)

    def save(self, run: Run, event: SavePoint) -> None:
        """Save the state for the next attempt."""
        attempt = self._attempt
        if self._kill_at is None:
            return
        content = BytesIO()
        torch.save(run.state_dict(), content)
        counters = run.progress.epoch, run.progress.batch, run.progress.steps
        attempt.saved = SavedState(content.getvalue(), attempt.fact_count, counters, run.checkpoints.last)

    def _kill(self, run: Run) -> None:
        self._attempt.killed = True
        self._note_facts(run)
        raise Killed

    def _note_facts(self, run: Run) -> None:
        facts = run.data.resume_facts()
        self._attempt.position, self._attempt.reasons = facts.position, facts.sentences

    def _at_train_start(self, run: Run, event: Event) -> None:
        origin = self._attempt.origin
        if origin is not None:
            path = origin.path if origin.path is not None and origin.path.exists() else None  # it may be pruned by now
            run.resume(torch.load(BytesIO(origin.content), weights_only=True), path)

    def _at_checkpoint_loaded(self, run: Run, event: Event) -> None:
        if self._attempt.facts:
            return  # a plugin rolled back within the run
        if self._attempt.origin is None:
            self._attempt.resumed_by_itself = True
            self._kill(run)

    def _at_batch_end(self, run: Run, event: Event) -> None:
        if run.progress.batches % self._save_every == 0:
            run.control.request_save(f"every {self._save_every} batches", by=BY)

    def _at_epoch_end(self, run: Run, event: Event) -> None:
        run.control.request_save("an epoch's end", by=BY)

    def _at_run_closed(self, run: Run, event: Event) -> None:
        if self._attempt.killed:
            return
        self._note_facts(run)
        train = run.data.train_loader
        loaders = train.loaders.values() if isinstance(train, Streams) else [train]
        self._attempt.workers = tuple(suspect for each in loaders for suspect in worker_suspects(each))
