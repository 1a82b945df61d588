"""The run and the control that handlers receive in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from heliograph import Bus, Control, DeviceEngine, NotRecorded, Progress
from heliograph.core.context import RunVerbs
from heliograph.events import Event, Phase
from heliograph.spi import Metrics

from ..format.records import AttemptRecord, Counters
from .entries import Entries

LOSSES = "Record them with Recorder(..., losses=True)."
HINTS = {"plugin_seconds": "`explain` shows the times at the end.", "reason": "`explain` shows it."}
UNREAD: Any = object()  # stands for a loss that is not recorded
COUNTERS = [field.name for field in fields(Counters) if field.name != "seconds"]


class Unrecorded:
    """Raises `NotRecorded` if an attribute is read that a recording lacks."""

    owner = "run"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotRecorded(f"{name!r} of the {self.owner}", HINTS.get(name, ""))


class UnrecordedCounts(dict[str, int]):
    """Counts by stream; reading one raises `NotRecorded`."""

    def __missing__(self, name: str) -> int:
        raise NotRecorded("the number of batches of each stream")


class RecordedOptimizer(Unrecorded):
    """An optimizer: plugins see that it exists."""

    owner = "optimizer"


class RecordedEngine(Unrecorded):
    """The engine of the main rank, without a device and without the values of the other ranks."""

    owner = "engine"
    rank = local_rank = 0
    is_main = is_local_main = True
    waited_seconds = 0.0

    def __init__(self, world_size: int) -> None:
        self.world_size, alone = world_size, DeviceEngine("cpu")
        self.barrier, self.refusing, self.writing = alone.barrier, alone.refusing, alone.writing
        if world_size == 1:
            self.reduce, self.gather, self.gather_objects = alone.reduce, alone.gather, alone.gather_objects
            self.broadcast, self.vote = alone.broadcast, alone.vote


class RecordedData(Unrecorded):
    """The data of a recorded run: the names of the validation sets and the number of batches."""

    owner = "data"
    in_hand = False
    evaluation_batches: int | None = None

    def __init__(self, run: ReplayRun, validation_sets: tuple[str, ...]) -> None:
        self._run, self.validation_sets = run, validation_sets

    @property
    def is_last_batch(self) -> bool:
        return self._run.is_last_batch()


class ReplayRun(Unrecorded, RunVerbs):
    """One attempt of a recorded run: the protocol `heliograph.Run`, including all parts except the data.

    Args:
        attempt: the recorded attempt.
        path: the recording.
        bus: the bus of the replay.
        entries: the entries from the current position on.

    Attributes:
        is_named: whether there are several optimizers, by name.
        started: whether a training began.
        finished: whether the training is over.
    """

    is_replay = True
    tracks = False  # recorded logs contain the tracked values
    queue = None
    is_resuming = False

    def __init__(self, attempt: AttemptRecord, path: Path, bus: Bus, entries: Entries) -> None:
        self._entries = entries
        self.bus, self.name = bus, attempt.run
        self.recording: Path | None = path
        self.phase: Phase = attempt.phase
        self.trains = attempt.phase == "train"
        self.progress = Progress(streams=UnrecordedCounts())
        self.progress.set_seconds(0.0)
        self.origin = self.progress.copy()
        self.control = Control(self.progress)
        self.metrics: dict[str, float] = Metrics()
        self.hyper_parameters = attempt.hyper_parameters
        self.optimizers: Mapping[str, Any] = {name: RecordedOptimizer() for name in attempt.optimizers}
        self.optimizer_name = next(iter(attempt.optimizers), "")
        self.optimizer: Any = self.optimizers.get(self.optimizer_name)
        self.is_named = self.trains and tuple(attempt.optimizers) != ("optimizer",)
        self.engine = RecordedEngine(attempt.world_size)
        self.data = RecordedData(self, attempt.validation_sets)
        self.max_epochs, self.max_steps = attempt.max_epochs, attempt.max_steps
        self.planned_steps = attempt.planned_steps
        self.batches_per_epoch: int | None = None
        self.window = 0
        self.best: Path | None = None
        self.last: Path | None = None
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.started = self.finished = self.in_boundary = False
        self.loss = None

    @property
    def length(self) -> Self:  # run.length.max_steps is run.max_steps
        return self

    stepping = checkpoints = hooks = report = length

    @property
    def loss(self) -> Any:
        if self._loss is UNREAD:
            raise NotRecorded("the losses here", LOSSES)
        return None if self._loss is None else torch.tensor(self._loss, dtype=torch.float64)

    @loss.setter
    def loss(self, value: Any) -> None:
        self._loss = value

    @property
    def losses(self) -> Mapping[str, Any]:
        if self.is_named:
            raise NotRecorded("the losses of several optimizers")
        return {self.optimizer_name: self.loss}

    @property
    def windows(self) -> Mapping[str, int]:
        if self.is_named:
            raise NotRecorded("the windows of several optimizers")
        return {self.optimizer_name: self.window}

    @property
    def unknown(self) -> str:
        return "" if self.planned_steps is not None else "the recording has no planned steps: record a run with steps="

    @property
    def epoch_fraction(self) -> float | None:
        return self.progress.epochs_done(self.batches_per_epoch)

    @property
    def fraction(self) -> float | None:
        return self.progress.part_done(self.planned_steps, skips=self.max_epochs is not None)

    def is_last_batch(self) -> bool:
        if self.batches_per_epoch is None:
            return self._entries.ends_epoch()
        return self.progress.batch + self.data.in_hand >= self.batches_per_epoch

    def label(self, name: str, optimizer: str | None = None) -> str:
        return f"{optimizer or self.optimizer_name}_{name}" if self.is_named else name

    def move_to(self, place: Counters) -> None:
        progress = self.progress
        for name in COUNTERS:
            setattr(progress, name, getattr(place, name))
        progress.set_seconds(place.seconds)

    def start_from(self, origin: Counters) -> None:
        self.progress.earlier_seconds = origin.seconds
        self.move_to(origin)
        self.origin = self.progress.copy()

    def emit(self, event: Event) -> None:
        self.bus.signal(type(event)).emit(self, event)

    def plan(self) -> str:
        return ""

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        if self._entries.milestone() != "checkpoint_loaded":
            self.control.record("roll_back", f"to {path or 'a saved state'}", None)
            raise NotRecorded(f"a roll-back to {path or 'a saved state'}: the run did not roll back here")
        super().roll_back(saved, path)

    def have_no_effect(self, *_: object, **__: object) -> None:
        """Ignore the call: recorded logs contain the tracked values, and no process ends with the replay."""

    track = weigh = have_no_effect
    settle = when_settling = when_leaving = exit_with = raise_when_closed = replace_error = have_no_effect
