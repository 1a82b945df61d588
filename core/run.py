"""One run: the context and the pieces of a loop, the framework's or one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..events import BatchEnd, BatchStart, Bus, GradientsReady, OrderedSignal, ShouldStop, StepEnd
from ..events.catalogue import Phase
from ..plugins import Plugins
from . import batches as data
from . import loop, state
from .closing import close_run
from .context import CLOSED, OPEN, RunContext
from .engine import LoopEngine
from .evaluation import Evaluation
from .result import RunResult
from .settings import Settings
from .task import eval_mode


class HotSignals:
    """The signals of every batch, held where the loop reaches them in one step."""

    def __init__(self, bus: Bus) -> None:
        self.batch_start: OrderedSignal[BatchStart] = bus.signal(BatchStart)
        self.gradients_ready: OrderedSignal[GradientsReady] = bus.signal(GradientsReady)
        self.step_end: OrderedSignal[StepEnd] = bus.signal(StepEnd)
        self.batch_end: OrderedSignal[BatchEnd] = bus.signal(BatchEnd)
        self.should_stop: OrderedSignal[ShouldStop] = bus.signal(ShouldStop)


class TrainRun(RunContext):
    """One `fit`, `validate` or `test`.

    A context: leaving it emits `RunFailed` if an exception passes, and `RunClosed` always. Within it, a loop of one's
    own is `for _ in run.epochs(): for batch in run.batches(): run.step(loss)`; then `run.result` says how it went.
    """

    result: RunResult

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        super().__init__(settings, bus, plugins, engine, phase)
        self.hot = HotSignals(bus)
        self.last_step = math.inf if settings.steps is None else settings.steps
        self._gradients = torch.enable_grad() if phase == "train" else torch.no_grad()
        self._batches: Iterator[Any] = iter(())

    def __enter__(self) -> Self:
        self.engine.place(self.modules.values())
        self.plugins.open()
        self._gradients.__enter__()
        if self.phase == "train":
            for module in self.modules.values():
                module.train()
            self.optimizer.zero_grad()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_contexts.close()
        self._gradients.__exit__(kind, error, trace)
        close_run(self, error)

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

    # The loop's side.

    @property
    def is_complete(self) -> bool:
        """Whether the asked-for length is reached."""
        return self.progress.steps >= self.last_step or self.progress.epoch >= (self.max_epochs or math.inf)

    def restore(self) -> bool:
        """Apply the state that `resume` was given, if any; return whether there was one."""
        if self.saved is None:
            return False
        state.apply(self, self.saved)
        self.saved, self.origin = None, self.progress.copy()
        if self.is_complete:
            self.note("nothing left to do: the checkpoint is at the run's end already")
        return True

    def feed(self) -> Iterator[Any]:
        """Return the rest of the epoch's batches, on the device."""
        return self.engine.feed(data.rest_of_epoch(self))

    @contextmanager
    def evaluating(self, phase: Phase) -> Iterator[Evaluation]:
        """Be in another phase for a while: eval mode, no gradients, means of its own."""
        former, means = self.phase, self.means
        self.phase = phase
        with eval_mode(self.modules), torch.no_grad():
            yield Evaluation(self, phase, self.settings.evaluations.get(phase, {}))
        # Not reached after an error, which so tells the phase that it came from.
        self.phase, self.means, self.batch, self.outputs = former, means, None, None

    def abandon_batch(self) -> None:
        """Finish the batch that a loop of one's own broke out of; that ends the epoch."""
        if self.stage == CLOSED:
            return
        self.control.end_epoch("the loop over the batches was left", by="the caller")
        if self.stage == OPEN:
            self.control.stage = "BatchStart"
            self.control.skip_batch("the loop over the batches was left", by="the caller")
            self.control.stage = ""
        self.control.leaving = True
        for _ in self._batches:
            raise AssertionError("leaving at this boundary was asked for")

    def blame(self, error: BaseException) -> tuple[str | None, str | None]:
        """Return the plugin and the event whose handler raised an error, if one did."""
        blamed = self.bus.blamed
        return blamed[1:] if blamed is not None and blamed[0] is error else (None, None)
