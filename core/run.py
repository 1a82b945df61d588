"""One run: the context and the pieces of a loop, the framework's or one's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..events import Bus
from ..events.catalogue import Phase
from ..plugins import Plugins
from . import batches as data
from . import loop
from .closing import close_run
from .context import RunContext
from .engine import LoopEngine
from .result import RunResult
from .settings import Settings


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
        self._entered = False
        self._gradients = torch.enable_grad() if phase == "train" else torch.no_grad()

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("A run is used once: ask trainer.run(...) for another.")
        try:
            self._prepare()
        except BaseException as error:  # a run that does not begin has no other end
            self.after.__exit__(type(error), error, error.__traceback__)
            raise
        self._gradients.__enter__()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open_contexts.close()
        self._gradients.__exit__(kind, error, trace)
        close_run(self, error)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each epoch; the run's and the epochs' events are emitted around them."""
        if not self._entered:
            raise RuntimeError(
                "A run begins with its context: with trainer.run(...) as run: for _ in run.epochs(): ..."
            )
        return loop.epochs(self)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the epoch; their events and the step boundaries are emitted around them."""
        self.open_batches = data.checked(self, loop.batches(self))
        return self.open_batches

    def step(self, loss: Tensor) -> None:
        """Take the loss of the batch in hand backward and step the optimizer, unless the step is held.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch.

        Raises:
            TypeError: the loss is not a tensor.
            ValueError: the loss is not a scalar.
        """
        if not self.in_hand:
            raise RuntimeError("run.step(loss) is for a batch of run.batches(): loop over them.")
        self.unstepped = False
        loop.step(self, loss)

    def _prepare(self) -> None:
        self.engine.place(self.modules.values())
        if self.phase == "train":
            for module in self.modules.values():
                module.train()
            self.optimizer.zero_grad()
        self.plugins.open()  # last: what fails before leaves the trainer free

    # The loop's side.

    def feed(self) -> Iterator[Any]:
        """Return the rest of the epoch's batches, on the device."""
        self.take_step = self.engine.bind_step(self.optimizer)
        return self.engine.feed(data.rest_of_epoch(self, partial(loop.tell_replay, self)))
