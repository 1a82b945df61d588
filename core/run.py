"""One run: what the loop works on and what handlers are given."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..events import (
    BatchEnd,
    BatchStart,
    Bus,
    Control,
    Engine,
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
from . import loop, state
from .closing import close_run
from .evaluation import Evaluation
from .metrics import Means
from .result import RunResult
from .task import check_loss, eval_mode, modules_of


class HotSignals:
    """The signals of every batch, held where the loop reaches them in one step."""

    __slots__ = ("batch_end", "batch_start", "gradients_ready", "should_stop", "step_end")

    def __init__(self, bus: Bus) -> None:
        self.batch_start: OrderedSignal[BatchStart] = bus.signal(BatchStart)
        self.gradients_ready: OrderedSignal[GradientsReady] = bus.signal(GradientsReady)
        self.step_end: OrderedSignal[StepEnd] = bus.signal(StepEnd)
        self.batch_end: OrderedSignal[BatchEnd] = bus.signal(BatchEnd)
        self.should_stop: OrderedSignal[ShouldStop] = bus.signal(ShouldStop)


@dataclass(frozen=True)
class Settings:
    """What one `fit`, `validate` or `test` was called with, checked by the trainer."""

    name: str
    task: Any
    train: Iterable[Any] | None = None
    evaluations: Mapping[Phase, Mapping[str, Iterable[Any]]] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    epochs: int | None = None
    steps: int | None = None
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)


class TrainRun:
    """One `fit`, `validate` or `test`; the protocol `Run` says what plugins may use of it.

    A context: leaving it emits `RunFailed` if an exception passes, and `RunClosed` always. Within it, a loop of one's
    own is `for _ in run.epochs(): for batch in run.batches(): run.step(loss)`.
    """

    optimizer: Any  # the trainer checks that there is one, and the loop is spared the question
    result: RunResult

    def __init__(self, settings: Settings, bus: Bus, plugins: Plugins, engine: Engine, phase: Phase = "train") -> None:
        self.bus, self.plugins, self.engine, self.phase, self.settings = bus, plugins, engine, phase, settings
        self.name, self.task, self.hyper_parameters = settings.name, settings.task, settings.hyper_parameters
        self.optimizer, self.scheduler = settings.optimizer, settings.scheduler
        self.max_epochs, self.max_steps = settings.epochs, settings.steps
        self.last_step = math.inf if settings.steps is None else settings.steps
        self.train_loader = settings.train
        self.batches_per_epoch = data.length_of(settings.train)
        self.modules = modules_of(settings.task)
        self.forward: Callable[..., Any] = engine.bind(getattr(settings.task, "training_step", check_loss))
        self.size_of: Callable[[Any], int] = getattr(settings.task, "batch_size", data.batch_size)
        self.progress = Progress()
        self.origin = self.progress.copy()
        self.control = Control(self.progress)
        self.hot = HotSignals(bus)
        self.metrics: dict[str, float] = {}
        self.means = Means()
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.window = 0
        self.stage = loop.CLOSED
        self.exhausted = self.finished = self.last_seen = False
        self.open_contexts = ExitStack()
        self.status: Status = "completed"
        self.best_checkpoint: Path | None = None
        self.last_checkpoint: Path | None = None
        self.resumed_from: Path | None = None
        self.evaluation_batches: int | None = None
        self.plugin_seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.replacement: BaseException | None = None
        self.began = perf_counter()
        self._contexts = ExitStack()
        self.log = bus.signal(Log)
        self._batches: Iterator[Any] = iter(())
        self._saved: Mapping[str, Any] | None = None
        self._when_positioned: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self.engine.place(self.modules.values())
        if self.phase == "train":
            self._contexts.enter_context(torch.enable_grad())
            for module in self.modules.values():
                module.train()
            self.optimizer.zero_grad()
        self.plugins.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_contexts.close()
        self._contexts.close()
        close_run(self, error)

    # A loop of one's own.

    def epochs(self) -> Iterator[int]:
        """Yield the index of each epoch; the run's and the epochs' events are emitted around them."""
        return loop.epochs(self)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the epoch; their events and the step boundaries are emitted around them."""
        self._batches = loop.batches(self)
        return self._batches

    def step(self, loss: Tensor) -> None:
        """Take the loss of the batch in hand backward and step the optimizer, unless the step is held.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch.

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: the loss is not a scalar.
        """
        loop.step(self, loss)

    # For plugins; documented in the protocol.

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in hand is the last of its epoch."""
        if self.batches_per_epoch is None:
            return self.last_seen
        return self.progress.batch + (self.stage != loop.CLOSED) >= self.batches_per_epoch

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
        self._saved, self.resumed_from = saved, path

    def when_positioned(self, action: Callable[[], None]) -> None:
        """Call `action` once, when the loader stands where it was and before it is read."""
        self._when_positioned.append(action)

    def replace_error(self, error: BaseException) -> None:
        """Let this error leave instead of the one that failed the run."""
        self.replacement = error

    def note(self, text: str) -> None:
        """Add a line that the result shows."""
        self.notes.append(text)

    def emit(self, event: Event) -> None:
        """Emit an event of one's own on this run's bus."""
        self.bus.emit(self, event)

    # The loop's side.

    @property
    def is_complete(self) -> bool:
        """Whether the asked-for length is reached."""
        return self.progress.steps >= self.last_step or self.progress.epoch >= (self.max_epochs or math.inf)

    def feed(self) -> Iterator[Any]:
        """Return the rest of the epoch's batches, on the device."""
        loader, done = self.train_loader, self.progress.batch
        assert loader is not None
        data.set_epoch(loader, self.progress.epoch)
        batches = iter(loader)
        if done:
            data.skip(batches, done)
            self.note(
                f"read {done} batches of epoch {self.progress.epoch} again to reach the position of the checkpoint"
            )
        actions, self._when_positioned = self._when_positioned, []
        for action in actions:
            action()
        return self.engine.feed(batches if self.batches_per_epoch is not None else self._one_ahead(batches))

    def restore(self) -> bool:
        """Apply the state that `resume` was given, if any; return whether there was one."""
        if self._saved is None:
            return False
        saved, self._saved = self._saved, None
        state.apply(self, saved)
        self.origin = self.progress.copy()
        if self.is_complete:
            self.note("nothing left to do: the checkpoint is at the run's end already")
        return True

    def read_means(self) -> dict[str, float]:
        """Return the means since the last log as `train/...`."""
        return self.means.read(self.phase)

    @contextmanager
    def evaluating(self, phase: Phase) -> Iterator[Evaluation]:
        """Be in another phase for a while: eval mode, no gradients, means of its own."""
        former, means = self.phase, self.means
        self.phase = phase
        with eval_mode(self.modules), torch.no_grad():
            yield Evaluation(self, phase, self.settings.evaluations.get(phase, {}))
        # Not reached after an error, which so tells the phase that it came from.
        self.phase, self.means, self.batch, self.outputs = former, means, None, None

    def check_exhausted(self) -> None:
        """Raise or warn where the loader ended before it had begun, or before it said it would."""
        batch, expected = self.progress.batch, self.batches_per_epoch
        if batch == 0:
            raise ValueError(
                f"The train loader yielded no batch in epoch {self.progress.epoch}. A generator can be read only once: "
                f"give a list, a DataLoader, or an object whose __iter__ begins anew."
            )
        if expected is not None and batch < expected:
            text = f"The train loader ended after {batch} batches, but its length says {expected}."
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def refuse_unstepped(self) -> None:
        """Raise: a loop of one's own passed over a batch."""
        raise RuntimeError(
            "run.step(loss) was not called for this batch. A batch is left out with control.skip_batch(reason) from a "
            "handler of BatchStart."
        )

    def abandon_batch(self) -> None:
        """Tidy up where a loop of one's own broke out of its batches: that ends the epoch."""
        if self.stage != loop.CLOSED:
            self.control.end_epoch("the loop over the batches was left", by="the caller")
            if self.stage == loop.OPEN:
                self.control.stage = "batch_start"
                self.control.skip_batch("the loop over the batches was left", by="the caller")
                self.control.stage = ""
            for _ in self._batches:
                raise AssertionError("leaving at this boundary was asked for")

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the plugin and the event whose handler raised an error, if one did."""
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)

    def _one_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch, self.last_seen in data.with_last(batches):
            yield batch
