"""What replayed handlers are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....core.errors import NotRecorded
from ....core.metrics.values import Metrics
from ....core.result import checked_note
from ....core.stepping.optimizers import SINGLE
from ....events import Bus, Control, Event, Progress, Request, TrainStart
from ....events.bus import is_within
from ....events.catalogue import Phase
from ....events.errors import describe_error
from ....events.run import CheckpointSource
from ..format.records import Attempt, Counters
from .control import ReplayControl
from .stand_ins import RecordedData, RecordedEngine, RecordedOptimizer, Unheld

LOSSES = "Record them with Recorder(..., losses=True)."
COUNTERS = ("epoch", "batch", "earlier_batches", "steps", "skipped_steps", "skipped_batches", "samples", "validations", "evaluated")  # fmt: skip  # noqa: E501


class ReplayRun:
    """One attempt of a recorded run; the protocol `heliograph.Run` documents it.

    Whatever the recording does not hold raises `NotRecorded`.

    Args:
        attempt: what is replayed.
        path: the recording.
        bus: the replay's.
        heard: called with each request that is made.
        goes_back: asked whether the recorded run went back at this place; see `roll_back`.

    Attributes:
        own_control: its control, which requests are put into and taken out of.
        several: whether there are several optimizers, by name.
        in_hand: whether a batch is under way.
        last_seen: of an epoch whose length nobody knew, whether this batch is its last.
        started: whether a training began.
        finished: whether it is over.
    """

    is_replay = True
    tracks = False  # what is tracked ends up in a log, and those are recorded
    queue = None
    verified_steps = 0  # of what is compared, the recording holds the event
    difference: str | None = None
    checkpoint_source: CheckpointSource | None = None
    batch_note: Any = Unheld("how the global batch changed")
    resumed_from: Any = Unheld("what the run was resumed from")
    resumed_at: Any = Unheld("where the run was resumed")
    epoch_begun: Any = Unheld("whether an epoch had begun")
    has_left_group = False
    is_resuming = False
    ranks_meet = False
    training_id: Any = Unheld("the identity of the training")
    plugins: Any = Unheld("the plugins of the run")
    validation_loaders: Any = Unheld("the validation loaders")
    batch_losses: Any = Unheld("the losses of a batch, each by itself")
    task: Any = Unheld("the task")
    modules: Any = Unheld("the modules")
    schedulers: Any = Unheld("the schedulers")
    scheduler: Any = Unheld("the scheduler")
    train_loader: Any = Unheld("the loader")
    batch: Any = Unheld("the batches themselves")
    outputs: Any = Unheld("what the task's step put out")
    plugin_seconds: Any = Unheld("how long each plugin had taken here", "At the end, `explain` tells.")

    def __init__(
        self,
        attempt: Attempt,
        path: Path,
        bus: Bus,
        heard: Callable[[Request], None],
        goes_back: Callable[[Path | None], bool],
    ) -> None:
        self.bus, self.name = bus, attempt.run
        self.recording: Path | None = path
        self.phase: Phase = attempt.phase
        self.trains = attempt.phase == "train"
        self.progress = Progress()
        self.progress.set_seconds(0.0)
        self.origin = self.progress.copy()
        self.own_control = ReplayControl(self.progress, heard)
        self.control: Control = self.own_control
        self.metrics: dict[str, float] = Metrics()
        self.hyper_parameters = attempt.hyper_parameters
        self.optimizers: Mapping[str, Any] = {name: RecordedOptimizer() for name in attempt.optimizers}
        self.optimizer_name = next(iter(attempt.optimizers), "")
        self.optimizer: Any = self.optimizers.get(self.optimizer_name)
        self.several = self.trains and tuple(attempt.optimizers) != (SINGLE,)
        self.engine, self.data = RecordedEngine(attempt.world_size), RecordedData()
        self.max_epochs, self.max_steps = attempt.max_epochs, attempt.max_steps
        self.validation_sets = attempt.validation_sets
        self.batches_per_epoch: int | None = None
        self.evaluation_batches: int | None = None
        self.window = 0
        self.best_checkpoint: Path | None = None
        self.last_checkpoint: Path | None = None
        self.notes: list[str] = []
        self.in_hand = self.last_seen = self.started = self.finished = self.in_boundary = False
        self.loss = None
        self._goes_back = goes_back
        self._unsettled: list[Callable[[], None]] = []

    @property
    def loss(self) -> Any:
        """The last training loss, a scalar tensor of float64; set as a number, `Unheld`, or None without one."""
        if isinstance(self._loss, Unheld):
            return self._loss.__get__(self)
        return None if self._loss is None else torch.tensor(self._loss, dtype=torch.float64)

    @loss.setter
    def loss(self, value: Any) -> None:
        self._loss: float | Unheld | None = value

    @property
    def losses(self) -> Mapping[str, Tensor | None]:
        """The last training loss of the one optimizer."""
        if self.several:
            raise NotRecorded("the loss of each of several optimizers")
        return {self.optimizer_name: self.loss}

    @property
    def windows(self) -> Mapping[str, int]:
        """The window of the one optimizer."""
        if self.several:
            raise NotRecorded("the window of each of several optimizers")
        return {self.optimizer_name: self.window}

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""
        if self.batches_per_epoch is None:
            return self.last_seen
        return self.progress.batch + self.in_hand >= self.batches_per_epoch

    @property
    def epoch_is_over(self) -> bool:
        """Whether the run stands behind an epoch's last batch, of which the end is still to be told."""
        return self.progress.batch > 0 and (self.is_last_batch or self.control.should_end_epoch)

    def label(self, name: str, optimizer: str | None = None) -> str:
        """Return the name to track a value by."""
        return f"{optimizer or self.optimizer_name}_{name}" if self.several else name

    def move(self, place: Counters) -> None:
        """Set the counters and the clock."""
        progress = self.progress
        for name in COUNTERS:
            setattr(progress, name, getattr(place, name))
        progress.set_seconds(place.seconds)

    def begin_from(self, origin: Counters) -> None:
        """Let the run begin from the counters of a checkpoint."""
        self.progress.earlier_seconds = origin.seconds
        self.move(origin)
        self.origin = self.progress.copy()

    def emit(self, event: Event) -> None:
        """Emit an event on the replay's bus."""
        self.bus.signal(type(event)).emit(self, event)

    def note(self, text: str) -> None:
        """Add a line that the report shows."""
        self.notes.append(checked_note(text))

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Do nothing, as in a run whose logs nobody reads."""

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Ask to go back; what follows is there only where the recorded run went back to the same checkpoint."""
        if not self.started or self.finished or is_within(TrainStart.name):
            raise RuntimeError("run.roll_back is for a training that goes on. At TrainStart, call run.resume(saved).")
        self.control.roll_back(f"to {path or 'a saved state'}")
        if not self._goes_back(path):
            self.own_control.drop("roll_back")
            raise NotRecorded(f"what follows a return to {path or 'a saved state'}: the run did not go back there")

    def exit_with(self, status: int) -> None:
        """Note with which status the process was to exit."""
        self.note(f"the process was to exit with status {status}")

    def raise_when_closed(self, error: BaseException) -> None:
        """Note which error `fit` was to raise."""
        self.note(f"the error that was to be raised at the end is {describe_error(error)}")

    def when_settling(self, action: Callable[[], None]) -> None:
        """Call `action` at every `settle()`."""
        if action not in self._unsettled:
            self._unsettled.append(action)

    def when_leaving(self, action: Callable[[], None]) -> None:
        """Do nothing: there is no group to leave."""

    def reason(self, error: BaseException | None) -> str:
        """Refuse."""
        raise NotRecorded("why the run ended, in words", "At the end, `explain` tells.")

    def settle(self) -> None:
        """Wait until what plugins do beside the replay is done."""
        for action in tuple(self._unsettled):
            action()

    def replace_error(self, error: BaseException) -> None:
        """Note which error was to leave."""
        self.note(f"the error that was to leave is {describe_error(error)}")

    def state_dict(self, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Refuse."""
        raise NotRecorded("the state of the run, such as its weights")

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Refuse."""
        raise NotRecorded("a training that could go on from another state")

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """Refuse."""
        raise NotRecorded("the data, whose draws are to be keyed")

    def isolate_observers(self, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        """Refuse."""
        raise NotRecorded("the training's random numbers")

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Refuse."""
        raise NotRecorded("the loader")
