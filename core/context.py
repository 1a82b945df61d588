"""What handlers are given: the facts of a run, and what they may ask of it beside control."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from ..events import (
    BatchEnd,
    BatchStart,
    Bus,
    Control,
    Event,
    GradientsReady,
    Log,
    OrderedSignal,
    Progress,
    ShouldStop,
    StepEnd,
)
from ..events.catalogue import Phase, Status
from ..plugins import Plugins
from . import batches as data
from . import state
from .engine import LoopEngine
from .metrics import Means
from .settings import Settings
from .task import check_loss, modules_of


class HotSignals:
    """The signals of every batch, held where the loop reaches them in one step."""

    def __init__(self, bus: Bus) -> None:
        self.batch_start: OrderedSignal[BatchStart] = bus.signal(BatchStart)
        self.gradients_ready: OrderedSignal[GradientsReady] = bus.signal(GradientsReady)
        self.step_end: OrderedSignal[StepEnd] = bus.signal(StepEnd)
        self.batch_end: OrderedSignal[BatchEnd] = bus.signal(BatchEnd)
        self.should_stop: OrderedSignal[ShouldStop] = bus.signal(ShouldStop)


class RunContext:
    """One run's facts; the protocol `heliograph.Run` documents them."""

    optimizer: Any  # the settings were checked, and the loop is spared the question

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        self.bus, self.plugins, self.engine, self.settings = bus, plugins, engine, settings
        self.phase: Phase = phase
        self.name, self.task, self.hyper_parameters = settings.name, settings.task, settings.hyper_parameters
        self.optimizer, self.scheduler = settings.optimizer, settings.scheduler
        self.max_epochs, self.max_steps = settings.epochs, settings.steps
        self.last_step = math.inf if settings.steps is None else settings.steps
        self.train_loader = settings.train
        self.batches_per_epoch = data.length_of(settings.train)
        self.modules: Mapping[str, Any] = modules_of(settings.task)
        self.forward: Callable[..., Any] = engine.bind(getattr(settings.task, "training_step", check_loss))
        self.backward: Callable[[Tensor], object] = engine.backward
        self.take_step: Callable[[], object]  # bound anew in every epoch: plugins may have patched the optimizer
        self.size_of: Callable[[Any], int] = getattr(settings.task, "batch_size", data.batch_size)
        self.progress = Progress()
        self.origin = self.progress.copy()
        self.control = Control(self.progress)
        self.log = bus.signal(Log)
        self.hot = HotSignals(bus)
        self.metrics: dict[str, float] = {}
        self.means = Means()
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.window = 0
        self.started = self.in_hand = self.unstepped = self.exhausted = self.finished = self.last_seen = False
        self.open_contexts = ExitStack()
        self.open_batches: Iterator[Any] = iter(())
        self.status: Status = "completed"
        self.best_checkpoint: Path | None = None
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.evaluation_batches: int | None = None
        self.plugin_seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.replacement: BaseException | None = None
        self.began = perf_counter()
        self.saved: Mapping[str, Any] | None = None
        self.actions: list[Callable[[], None]] = []

    @property
    def is_complete(self) -> bool:
        """Whether the asked-for length is reached."""
        return self.progress.steps >= self.last_step or self.progress.epoch >= (self.max_epochs or math.inf)

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""
        if self.batches_per_epoch is None:
            return self.last_seen
        return self.progress.batch + self.in_hand >= self.batches_per_epoch

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets."""
        return tuple(self.settings.evaluations.get("validation", ()))

    @property
    def tracks(self) -> bool:
        """Whether somebody will read what is tracked now."""
        return self.phase != "train" or bool(self.log.chain)

    def track(self, name: str, value: Any, weight: float = 1.0) -> None:
        """Add a value to the running mean of `<phase>/<name>`."""
        if self.tracks:
            self.means.add(name, value, weight)

    def state_dict(self) -> dict[str, Any]:
        """Return one consistent cut of everything that a resumed run needs."""
        return state.capture(self)

    def resume(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Continue from a saved state, applied when every `TrainStart` handler has run."""
        self._only_in("TrainStart", "resume")
        self.saved, self.resumed_from = saved, path

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader stands where it was and before it is read."""
        self.actions.append(action)

    def replace_error(self, error: BaseException) -> None:
        """Let this error leave instead of the one that failed the run."""
        self._only_in("RunFailed", "replace_error")
        self.replacement = error

    def note(self, text: str) -> None:
        """Add a line that the result shows."""
        self.notes.append(text)

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the plugin and the event whose handler raised an error, if one did."""
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)

    def _only_in(self, stage: str, verb: str) -> None:
        if self.control.stage != stage:
            raise RuntimeError(f"run.{verb} is for handlers of {stage}: elsewhere it would have no effect.")

    def emit(self, event: Event) -> None:
        """Emit an event on this run's bus."""
        self.bus.signal(type(event)).emit(self, event)
