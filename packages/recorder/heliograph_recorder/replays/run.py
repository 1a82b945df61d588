"""The run and the control that handlers receive in a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from heliograph import Bus, Control, NotRecorded, Progress, TrainStart
from heliograph.core.context import LineVerbs
from heliograph.events import CHANGES, CheckpointSource, Event, Phase, Request, Verb, is_within
from heliograph.spi import Metrics, describe_error
from torch import Tensor

from ..format.records import AttemptRecord, Counters
from ..verbs import EVALUATION_VERB, TAKEN_BACK
from .stubs import RecordedData, RecordedEngine, RecordedOptimizer, UnrecordedAttribute, UnrecordedCounts

AT_BOUNDARY: Final = ("stop", "end_epoch", "roll_back", "log", "validation", "save", "next_phase", *CHANGES)


class ReplayControl(Control):
    """A control to which recorded requests can be added, and from which requests can be removed.

    Args:
        progress: the counters of the replayed run.
        on_request: called with each request of a replayed plugin, including repetitions.

    Attributes:
        is_held: whether the step of the current batch is known to be held.
    """

    __slots__ = ("_loss_scale", "_on_request", "_others_hold", "_scale_is_unknown", "is_held")

    def __init__(self, progress: Progress, on_request: Callable[[Request], None]) -> None:
        super().__init__(progress)
        self._on_request, self._scale_is_unknown, self._others_hold = on_request, False, False

    @property
    def loss_scale(self) -> float:
        if self._scale_is_unknown:
            raise NotRecorded("the loss scale of other plugins")
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = value

    @property
    def holds_step(self) -> bool:
        if self._others_hold and not self.is_held:
            raise NotRecorded("the held steps of other plugins")
        return self.is_held

    @holds_step.setter
    def holds_step(self, value: bool) -> None:
        self.is_held = value

    def scale_loss(self, factor: float, reason: str, *, by: str | None = None, averages: bool = False) -> None:
        unknown, self._scale_is_unknown = self._scale_is_unknown, False
        super().scale_loss(factor, reason, by=by, averages=averages)
        self._scale_is_unknown = unknown

    def add_recorded(self, recorded: Request) -> Request:
        """Add a request of the recorded run; return its copy in the history."""
        request, requests = replace(recorded), self.open_requests()
        if request.verb in AT_BOUNDARY and request.what not in requests:
            self._replace({**requests, request.what: request}, vetoed=self.vetoed)
            return request
        self.history.append(request)
        self.history.total += 1
        if request.verb == EVALUATION_VERB:
            self.cut_request = request
        match request.verb:
            case "veto_stop":
                self.postpone_stop()
            case "skip_batch":
                self.skips_batch = self.touched = True
            case "hold_step":
                self.is_held = self._others_hold = self.touched = True
            case "skip_step":
                self.drops_step = self.touched = True
            case "scale_loss":
                self._scale_is_unknown = self.touched = True
            case "veto_save":
                self._save_veto, self.pending = request, True
        if request.verb in TAKEN_BACK and request.verb != "veto_save":
            self.remove(TAKEN_BACK[request.verb])
        return request

    def remove(self, subject: str) -> None:
        """Remove an open request by its `what`."""
        requests = self.open_requests()
        if requests.pop(subject, None) is not None:
            self._replace(requests, vetoed=self.vetoed)

    def postpone_stop(self) -> None:
        self._replace(self.open_requests(), vetoed=True)

    def record(self, verb: Verb, reason: str, by: str | None) -> Request:
        request = super().record(verb, reason, by)
        self._on_request(request)
        return request

    def _replace(self, requests: dict[str, Request], *, vetoed: bool) -> None:
        was_pending = self.pending  # stays set until the boundary ends
        self.adopt(requests, vetoed=vetoed)
        self.pending |= was_pending


LOSSES = "Record them with Recorder(..., losses=True)."
COUNTERS = [field.name for field in fields(Counters) if field.name != "seconds"]


class ReplayRun(LineVerbs):
    """One attempt of a recorded run. It implements the protocol `heliograph.Run`, including all parts except the data.

    Reading unrecorded attributes raises `NotRecorded`.

    Args:
        attempt: the recorded attempt.
        path: the recording.
        bus: the bus of the replay.
        on_request: called with each request of a replayed plugin.
        rolls_back_to: returns whether the recorded run rolled back to a checkpoint at the current position.

    Attributes:
        own_control: `control`, with the methods of a replay.
        is_named: whether there are several optimizers, by name.
        is_last_seen: whether the current batch is the last of an epoch of unknown length.
        started: whether a training began.
        finished: whether the training is over.
    """

    is_replay = True
    tracks = False  # recorded logs contain the tracked values
    queue = None
    verified_steps = 0  # only the event of the comparison is recorded
    difference: str | None = None
    source: CheckpointSource | None = None
    batch_note: Any = UnrecordedAttribute("the change of the global batch")
    resumed_from: Any = UnrecordedAttribute("the source of the resume")
    resumed_at: Any = UnrecordedAttribute("the position of the resume")
    has_left_group = False
    is_resuming = False
    ranks_meet = False
    training_id: Any = UnrecordedAttribute("the id of the training")
    forked_from: Any = UnrecordedAttribute("the parent of a fork")
    plugins: Any = UnrecordedAttribute("the plugins of the run")
    window_count: Any = UnrecordedAttribute("the counts of the losses")
    batch_losses: Any = UnrecordedAttribute("the separate losses of a batch")
    task: Any = UnrecordedAttribute("the task")
    modules: Any = UnrecordedAttribute("the modules")
    schedulers: Any = UnrecordedAttribute("the schedulers")
    scheduler: Any = UnrecordedAttribute("the scheduler")
    scheduler_steps: Any = UnrecordedAttribute("the planned steps of schedulers")
    batch: Any = UnrecordedAttribute("the batches themselves")
    forward: Any = UnrecordedAttribute("the training step")
    collected: Any = UnrecordedAttribute("the collected values of an evaluation")
    outputs: Any = UnrecordedAttribute("the outputs of the task's step")
    plugin_seconds: Any = UnrecordedAttribute("the time of each plugin so far", "`explain` shows the times at the end.")
    collect: Any = UnrecordedAttribute("the batches of an evaluation")
    reason: Any = UnrecordedAttribute("the reason of the end during a run", "`explain` shows it.")
    state_dict: Any = UnrecordedAttribute("the state of the run, such as its weights")
    resume: Any = UnrecordedAttribute("a training from a different state")
    isolate_observers: Any = UnrecordedAttribute("the training's random numbers")
    when_positioned: Any = UnrecordedAttribute("the loader")

    def __init__(
        self,
        attempt: AttemptRecord,
        path: Path,
        bus: Bus,
        on_request: Callable[[Request], None],
        rolls_back_to: Callable[[Path | None], bool],
    ) -> None:
        self.bus, self.name = bus, attempt.run
        self.recording: Path | None = path
        self.phase: Phase = attempt.phase
        self.trains = attempt.phase == "train"
        self.progress = Progress(streams=UnrecordedCounts())
        self.progress.set_seconds(0.0)
        self.origin = self.progress.copy()
        self.own_control = ReplayControl(self.progress, on_request)
        self.control: Control = self.own_control
        self.metrics: dict[str, float] = Metrics()
        self.hyper_parameters = attempt.hyper_parameters
        self.optimizers: Mapping[str, Any] = {name: RecordedOptimizer() for name in attempt.optimizers}
        self.optimizer_name = next(iter(attempt.optimizers), "")
        self.optimizer: Any = self.optimizers.get(self.optimizer_name)
        self.is_named = self.trains and tuple(attempt.optimizers) != ("optimizer",)
        self.engine = RecordedEngine(attempt.world_size)
        self.data = RecordedData(attempt.validation_sets, self.is_last_batch)
        self.max_epochs, self.max_steps = attempt.max_epochs, attempt.max_steps
        self.planned_steps = attempt.planned_steps
        self.batches_per_epoch: int | None = None
        self.window = 0
        self.best: Path | None = None
        self.last: Path | None = None
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.is_last_seen = self.started = self.finished = self.in_boundary = False
        self.loss = None
        self._rolls_back_to = rolls_back_to
        self._settling: list[Callable[[], None]] = []

    @property
    def length(self) -> Self:  # run.length.max_steps is run.max_steps
        return self

    stepping = checkpoints = hooks = report = length

    @property
    def loss(self) -> Any:
        if isinstance(self._loss, UnrecordedAttribute):
            return self._loss.__get__(self)
        return None if self._loss is None else torch.tensor(self._loss, dtype=torch.float64)

    @loss.setter
    def loss(self, value: Any) -> None:
        self._loss: float | UnrecordedAttribute | None = value

    @property
    def losses(self) -> Mapping[str, Tensor | None]:
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
            return self.is_last_seen
        return self.progress.batch + self.data.in_hand >= self.batches_per_epoch

    @property
    def epoch_is_over(self) -> bool:
        return self.progress.batch > 0 and (self.is_last_batch() or self.control.should_end_epoch)

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

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        pass  # recorded logs contain the tracked values

    def weigh(self, count: Any) -> None:
        pass  # the tokens are recorded

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        if not self.started or self.finished or is_within(TrainStart.name):
            raise RuntimeError("run.roll_back needs a started training. At TrainStart, call run.resume(saved).")
        self.control.roll_back(f"to {path or 'a saved state'}")
        if not self._rolls_back_to(path):
            self.own_control.remove("roll_back")
            raise NotRecorded(f"a roll-back to {path or 'a saved state'}: the run did not roll back here")

    def exit_with(self, status: int) -> None:
        self.note(f"the process would have exited with status {status}")

    def raise_when_closed(self, error: BaseException) -> None:
        self.note(f"fit would have raised this at the end: {describe_error(error)}")

    def when_settling(self, action: Callable[[], None]) -> None:
        if action not in self._settling:
            self._settling.append(action)

    def when_leaving(self, action: Callable[[], None]) -> None:
        pass

    def settle(self) -> None:
        for action in tuple(self._settling):
            action()

    def replace_error(self, error: BaseException) -> None:
        self.note(f"this error would have replaced the original one: {describe_error(error)}")
