"""One leg of a check: a run that is watched, may begin at a saved state, and may be killed."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from heliograph.builtin_callbacks.checkpoint.repeated.rows import Rows
from heliograph.builtin_callbacks.checkpoint.repeated.suspects import listeners_to_epoch_start
from heliograph.core.trainer import Trainer
from heliograph.events import CATALOGUE, Event, Lane, Log, Run, SavePoint, ValidationEnd
from heliograph.events.guarantee import Guarantee
from heliograph.testing.resume import suspects
from heliograph.testing.resume.facts import Fact, Leaf, Leaves, leaves
from heliograph.testing.resume.moments import AFTER_THE_END, Clock, Moment

OF_THE_PROCESS = ("unseen", "schema", "saved_at", "versions", "run_name", "training_id", "world")
BY = "the resume check"


class Killed(BaseException):
    """Ends a leg as abruptly as that can be done within a process."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A state that a leg left behind, as it would lie on a disk.

    Attributes:
        content: the bytes.
        facts: how many facts an uninterrupted run has up to there.
        place: finished epochs, finished batches of the epoch, and steps.
        path: the newest checkpoint that the run itself had written by then, if any.
    """

    content: bytes
    facts: int
    place: tuple[int, int, int]
    path: Path | None


@dataclass(slots=True)
class Leg:
    """What a leg did.

    Attributes:
        begun: the state that it began with, None where it began afresh.
        facts: what it is compared by.
        moments: where it could have been killed.
        killed: whether it was killed.
        foreign: whether it began at a checkpoint that the check knows nothing of.
        saved: the newest state that it left behind.
        metrics: the names of the metrics that were told.
        hear_epoch_start: who of the user's own hears `EpochStart`, in words.
        workers: what makes the loader's workers doubtful.
        guarantee: what the run itself says that a resume is worth.
        reasons: why it is not `exact`: what it compared after a resume, and what it cannot see.
    """

    begun: Saved | None
    facts: list[Fact] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    killed: bool = False
    foreign: bool = False
    saved: Saved | None = None
    metrics: set[str] = field(default_factory=set)
    hear_epoch_start: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    guarantee: Guarantee = "exact"
    reasons: tuple[str, ...] = ()

    @property
    def known(self) -> int:
        """How many facts an uninterrupted run has up to now."""
        return len(self.facts) + (self.begun.facts if self.begun else 0)


def run_leg(
    trainer: Trainer,
    options: Mapping[str, Any],
    *,
    save_every: int,
    begun: Saved | None = None,
    kill: Moment | None = None,
) -> Leg:
    """Train, from a state or afresh, to the end or until killed; return what happened.

    Args:
        trainer: of this leg alone.
        options: of its `fit`.
        save_every: batches between the save points that are asked for; at the end of an epoch there is one too.
        begun: the state to begin with.
        kill: when to be killed.
    """
    leg = Leg(begun, hear_epoch_start=listeners_to_epoch_start(trainer.plugins, trainer.bus))
    Watcher(leg, trainer, save_every, kill).listen()
    try:
        trainer.fit(**{**options, "on_interrupt": "raise"})
    except BaseException as error:
        if not isinstance(error, Killed) and not isinstance(error.__cause__, Killed):
            raise
    if leg.killed:
        gc.collect()  # a killed run lies in cycles, and with it its loader's worker processes
    return leg


class Watcher:
    """Listens to everything in a leg, behind everybody else."""

    def __init__(self, leg: Leg, trainer: Trainer, save_every: int, kill: Moment | None) -> None:
        self._leg, self._trainer, self._save_every, self._kill = leg, trainer, save_every, kill
        self._clock, self._rows = Clock(), Rows()

    def listen(self) -> None:
        """Subscribe to every event that there is."""
        bus = self._trainer.bus
        for event in dict.fromkeys([*CATALOGUE, *(signal.event for signal in bus.signals())]):
            bus.on(event, self.hear, lane=Lane.REPORT)
        bus.on(SavePoint, self.capture, lane=Lane.PERSIST)

    def hear(self, run: Run, event: Event) -> None:
        """Note what is to be compared, ask for saves, and kill where the time has come."""
        react = getattr(self, f"_at_{event.name}", None)
        if react is not None:
            react(run, event)
        if event.name in AFTER_THE_END:
            return
        moment = self._clock.tell(event, run.progress)
        self._leg.moments.append(moment)
        if moment == self._kill:
            self._die(run)

    def capture(self, run: Run, event: SavePoint) -> None:
        """Keep the state, as bytes, for the leg that follows."""
        leg = self._leg
        if self._kill is None:
            return
        content = BytesIO()
        torch.save(run.state_dict(), content)
        leg.saved = Saved(content.getvalue(), leg.known, _place(run), run.last_checkpoint)

    def _die(self, run: Run) -> None:
        self._leg.killed = True
        self._note_worth(run)
        raise Killed

    def _note_worth(self, run: Run) -> None:
        guarantee, self._leg.reasons = run.data.guarantee()
        self._leg.guarantee = cast("Guarantee", guarantee)

    def _at_train_start(self, run: Run, event: Event) -> None:
        begun = self._leg.begun
        if begun is not None:
            path = begun.path if begun.path is not None and begun.path.exists() else None  # it may be pruned by now
            run.resume(torch.load(BytesIO(begun.content), weights_only=True), path)

    def _at_checkpoint_loaded(self, run: Run, event: Event) -> None:
        if self._leg.facts:
            return  # a plugin went back within the run
        if self._leg.begun is None:
            self._leg.foreign = True
            self._die(run)

    def _at_batch_start(self, run: Run, event: Event) -> None:
        self._add(run, "batch", run.batch, _in_hand(run, 1), begun=1)

    def _at_batch_end(self, run: Run, event: Event) -> None:
        self._leg.facts.append(Fact("draws", _in_hand(run), _place(run), generators()))
        for row in (*self._rows.of(run), *self._rows.late(wait=True)):
            self._leg.facts.append(Fact("loss", _in_hand(run), _place(run), {"": Leaf("row", row.bits, row)}))
        if run.progress.batches % self._save_every == 0:
            run.control.request_save(f"every {self._save_every} batches", by=BY)

    def _at_log(self, run: Run, event: Log) -> None:
        self._add_metrics(run, event.metrics, "in the log")

    def _at_validation_end(self, run: Run, event: ValidationEnd) -> None:
        self._add_metrics(run, event.metrics, "in the validation")

    def _at_epoch_end(self, run: Run, event: Event) -> None:
        self._add_state(run, f"at the end of epoch {run.progress.epoch - 1}")
        run.control.request_save("an epoch's end", by=BY)

    def _at_run_closed(self, run: Run, event: Event) -> None:
        if self._leg.killed:
            return
        self._add_state(run, "at the end of the run")
        self._note_worth(run)
        self._leg.workers = tuple(suspects.of_workers(run.train_loader))

    def _add_metrics(self, run: Run, metrics: Mapping[str, float], where: str) -> None:
        self._leg.metrics |= metrics.keys()
        self._add(run, "metrics", metrics, "{} at epoch {}, batch {}, step {}".format(where, *_place(run)))

    def _add_state(self, run: Run, when: str) -> None:
        state = run.state_dict()
        del state["progress"]["earlier_seconds"]
        del state["data"]["doubts"]  # with what they are of, they are the result's to say
        for name in OF_THE_PROCESS:
            del state[name]
        for name, own in state.pop("plugins").items():
            state[f"plugin {name}"] = own
        for what, value in state.items():
            self._add(run, what, value, when)

    def _add(self, run: Run, what: str, value: Any, when: str, *, begun: int = 0) -> None:
        found = leaves(value)
        if what.startswith("plugin "):  # their texts name files and dates, which no two runs have in common
            found = {path: leaf for path, leaf in found.items() if leaf.kind != "str"}
        self._leg.facts.append(Fact(what, when, _place(run, begun), found))


def generators() -> Leaves:
    """Return the states of the global random generators, by name."""
    state = {
        "python": repr(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    return {path: replace(leaf, glimpse=None) for path, leaf in leaves(state).items()}


def _place(run: Run, begun: int = 0) -> tuple[int, int, int]:
    return run.progress.epoch, run.progress.batch + begun, run.progress.steps


def _in_hand(run: Run, begun: int = 0) -> str:
    return "in epoch {}, batch {}, step {}".format(*_place(run, begun))
