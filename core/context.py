"""What handlers are given: the facts of a run, and what they may ask of it beside control."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

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
    Run,
    ShouldStop,
    StepEnd,
)
from ..events.bus import Receiver
from ..events.catalogue import Phase, Status
from ..events.checks import check_whole_number
from ..plugins import Plugins
from . import batches as data
from . import state
from .data.training_data import TrainingData
from .engines.contract import LoopEngine
from .global_batch import BatchChange
from .launching import RankQueue, child_queue
from .metrics import Means, Metrics
from .ranks.agreement import Agreement, Alone
from .result import checked_note
from .rounds import Round
from .saving.resuming import Depot
from .settings import Settings
from .shared_means import SharedMeans
from .task import modules_of
from .unseen.comparison import Unseen


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
    is_replay = False
    recording: Path | None = None

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        self.bus, self.plugins, self.engine, self.settings = bus, plugins, engine, settings
        self.phase: Phase = phase
        self.name, self.task, self.hyper_parameters = settings.name, settings.task, settings.hyper_parameters
        self.training_id = uuid4().hex  # of the system's entropy: it draws from no generator; a resume inherits another
        self.optimizers: Mapping[str, Any] = settings.optimizers
        self.schedulers: Mapping[str, Any] = settings.schedulers
        self.optimizer_name = next(iter(self.optimizers), "")
        self.optimizer = self.optimizers.get(self.optimizer_name)
        self.scheduler = self.schedulers.get(self.optimizer_name)
        self.round = Round(self.optimizers, self.schedulers) if settings.several else None
        self.max_epochs, self.max_steps = settings.epochs, settings.steps
        self.last_step = math.inf if settings.steps is None else settings.steps
        self.notes: list[str] = []
        self.data = TrainingData(
            settings.train, engine, self.note, per_sample=settings.per_sample, as_ranks=settings.as_ranks
        )
        self.modules: Mapping[str, Any] = modules_of(settings.task)
        self.forward: Callable[..., Any]  # bound when the engine is set up
        self.backward: Callable[[Tensor], object] = engine.backward
        self.take_step: Callable[[], object]  # bound anew in every epoch: plugins may have patched the optimizer
        self.zero_grad: Callable[[], object]
        self.size_of: Callable[[Any], int] = getattr(settings.task, "batch_size", data.batch_size)
        self.progress = Progress()
        self.origin = self.progress.copy()
        self.control = Control(self.progress)
        self.shared = engine.world_size > 1
        self.agreement: Agreement | Alone = Agreement(self) if self.shared else Alone()
        self.log = bus.signal(Log)
        self.hot = HotSignals(bus)
        self.metrics: dict[str, float] = Metrics()
        self.means = SharedMeans(engine) if self.shared else Means()
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.window = 0
        self.epoch_begun = False  # whether `EpochStart` was emitted for the epoch that `progress` names
        self.at_save_point = False  # whether a boundary's requests are served, and its state is being saved
        self.in_boundary = False  # whether the state that was loaded was saved there: `ShouldStop` is still to come
        self.started = self.in_hand = self.unstepped = self.exhausted = self.finished = self.last_seen = False
        self.open_contexts = ExitStack()
        self.after = ExitStack()
        self.after.callback(self.data.close)
        self.open_batches: Iterator[Any] = iter(())
        self.status: Status = "completed"
        self.best_checkpoint: Path | None = None
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.resumed_at: Progress | None = None
        self.evaluation_batches: int | None = None
        self.plugin_seconds: dict[str, float] = {}
        self.replacement: BaseException | None = None
        self.exit_status: int | None = None
        self.parting: BaseException | None = None
        self.began = perf_counter()
        self.saved: Mapping[str, Any] | None = None
        self.saved_path: Path | None = None
        self.depot: Depot | None = None
        self.batch_change: BatchChange = "refuse"
        self.unseen: Unseen | None = None
        self.restores_attributes = True
        self.restored: list[str] = []  # attributes that no state_dict holds
        self.other_batches: str | None = None  # what became of the global batch at a resume
        self.verified_steps = 0
        self.difference: str | None = None
        self.resumes = False  # what is saved there is for a resume, not for a return
        self.fresh_plugins: tuple[str, ...] = ()
        self.unclaimed_states: tuple[str, ...] = ()
        self.actions: list[Callable[[], None]] = []
        self.unsettled: list[Callable[[], None]] = []
        self.before_leaving: list[Callable[[], None]] = []
        self.has_left = False  # whether this rank has left the others, for an error that not all of them share
        self.apart: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def queue(self) -> RankQueue | None:
        """Where to put what the process that called `launch` is to get at once."""
        return child_queue()

    @property
    def train_loader(self) -> Any:
        """The iterable of training batches, or None."""
        return None if self.data.source is None else self.data.source.loader

    @property
    def batches_per_epoch(self) -> int | None:
        """Its length, None where nobody knows."""
        return None if self.data.source is None else self.data.source.length

    @property
    def is_complete(self) -> bool:
        """Whether the asked-for length is reached."""
        return self.progress.steps >= self.last_step or self.progress.epoch >= (self.max_epochs or math.inf)

    @property
    def epoch_is_over(self) -> bool:
        """Whether a resumed run stands behind an epoch's last batch: the end of the epoch is still to be told."""
        control = self.control
        ended = self.is_last_batch or control.should_end_epoch
        return ended and self.progress.batch > 0 and not control.keeps_epoch_open

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""
        if self.batches_per_epoch is None:
            return self.last_seen
        return self.progress.batch + self.in_hand >= self.batches_per_epoch

    @property
    def losses(self) -> Mapping[str, Tensor | None]:
        """The last training loss of each optimizer, by its name."""
        return {self.optimizer_name: self.loss} if self.round is None else self.round.losses

    @property
    def windows(self) -> Mapping[str, int]:
        """How many micro-batches have left their gradients since the last step of each optimizer."""
        return {self.optimizer_name: self.window} if self.round is None else self.round.windows

    def label(self, name: str, optimizer: str | None = None) -> str:
        """Return the name to track a value by: `loss`, or `generator_loss` where several optimizers have names."""
        return name if self.round is None else f"{optimizer or self.optimizer_name}_{name}"

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """The names of the validation sets."""
        return tuple(self.settings.evaluations.get("validation", ()))

    @property
    def tracks(self) -> bool:
        """Whether somebody will read what is tracked now."""
        return self.phase != "train" or bool(self.log.chain) or self.shared  # some other rank may be the one that logs

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
        self.saved, self.saved_path, self.resumes = saved, path, True

    def roll_back(self, saved: Mapping[str, Any], path: Path | None = None) -> None:
        """Give the epoch up at the next boundary, and go on from a saved state."""
        if not self.started or self.finished or self.control.stage == "TrainStart":
            raise RuntimeError("run.roll_back is for a training that goes on. At TrainStart, call run.resume(saved).")
        self.control.roll_back(f"to {path or 'a saved state'}")
        self.saved, self.saved_path = saved, path

    def exit_with(self, status: int) -> None:
        """Say with which status the process is to exit, where the run ends without an exception."""
        self.exit_status = check_whole_number("An exit status", status, at_least=0, at_most=255)

    def raise_when_closed(self, error: BaseException) -> None:
        """Let `fit` raise this instead of returning, when a run that did not fail is closed."""
        self.parting = error

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader stands where it was and before it is read."""
        self.actions.append(action)

    def when_settling(self, action: Callable[[], None]) -> None:
        """Call `action` whenever somebody needs what is under way beside the loop to be done."""
        if action not in self.unsettled:
            self.unsettled.append(action)

    def when_leaving(self, action: Callable[[], None]) -> None:
        """Call `action` before this rank leaves its group for an error: to wait for what uses the group in a thread."""
        if action not in self.before_leaving:
            self.before_leaving.append(action)

    def settle(self) -> None:
        """Wait until nothing is under way beside the loop, and all of it is told."""
        for action in tuple(self.unsettled):
            action()

    def isolate_observers(self, apart: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run the handlers of observers within `apart()`, until the run is closed."""
        self._only_in("TrainStart", "isolate_observers")
        self.apart = apart

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Have the handlers of observers wrapped, in case that somebody isolates them: those of `TrainStart` too."""

        def wrapper(receiver: Receiver, owner: str) -> Receiver:
            if not self.plugins.runs_apart(owner):
                return receiver

            def guarded(run: Run, *, event: Event) -> None:
                with self.apart():
                    receiver(run, event=event)

            return guarded

        take_off = self.bus.wrap_all(wrapper)
        self.after.callback(take_off)
        yield
        if self.apart is nullcontext:
            take_off()

    def arrive(self) -> None:
        """Do what waits for the loader to stand where it was."""
        while self.actions:
            self.actions.pop(0)()

    def key_draws(self, seed: int, *, probe: bool = True) -> None:
        """Make the order of samples and the draws of loading a function of (seed, epoch, position)."""
        self._only_in("TrainStart", "key_draws")
        self.data.key(seed, probe=probe)

    def replace_error(self, error: BaseException) -> None:
        """Let this error leave instead of the one that failed the run."""
        self._only_in("RunFailed", "replace_error")
        self.replacement = error

    def note(self, text: str) -> None:
        """Add a line that the result shows."""
        self.notes.append(checked_note(text))

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the plugin and the event whose handler raised an error, if one did."""
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)

    def _only_in(self, stage: str, verb: str) -> None:
        if self.control.stage != stage:
            raise RuntimeError(f"run.{verb} is for handlers of {stage}: elsewhere it would have no effect.")

    def emit(self, event: Event) -> None:
        """Emit an event on this run's bus; what waits for the end of one apart from the training is done then."""
        if not event.apart:
            self.bus.signal(type(event)).emit(self, event)
            return
        waiting, self.actions = self.actions, []
        try:
            self.bus.signal(type(event)).emit(self, event)
            self.arrive()
        finally:
            self.actions = waiting
