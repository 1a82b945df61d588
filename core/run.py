"""One run: the context and the pieces of a loop, the framework's or the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch

from ..events import Bus, Phase
from ..plugins import Plugins
from . import loop
from .context import RunContext
from .engines.options import begin_train_mode
from .host import current_host
from .result import RunResult
from .run_end import close_run
from .settings import Settings

if TYPE_CHECKING:
    from .engines.contract import LoopEngine
    from .task import Loss

_RUNS: WeakKeyDictionary[TrainRun, int] = WeakKeyDictionary()  # active runs and their threads


class TrainRun(RunContext):
    """One `fit`, `validate` or `test`.

    A context manager: leaving it emits `RunFailed` after an exception, and `RunClosed` always. Within it, your own loop
    is `for _ in run.epochs(): for batch in run.batches(): run.step(loss)`. Afterwards, `run.result` has the outcome.
    """

    def __init__(
        self, settings: Settings, bus: Bus, plugins: Plugins, engine: LoopEngine, phase: Phase = "train"
    ) -> None:
        super().__init__(settings, bus, plugins, engine, phase)
        self._entered = False
        self._gradients = torch.enable_grad() if phase == "train" else torch.no_grad()

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("A run can be used once: call trainer.run(...) again.")
        try:
            if is_in_run(self.engine):
                kind = type(self.engine).__name__
                raise RuntimeError(f"This {kind} is in use by another run: use another Trainer with its own engine.")
            self.plugins.check_free()
        except RuntimeError:
            self.hooks.closing.close()  # without an error: the engine stays in its group for the other run
            raise
        _RUNS[self] = get_ident()
        try:
            self._prepare()
        except BaseException as error:  # __exit__ is not called
            try:
                self.hooks.closing.__exit__(type(error), error, error.__traceback__)
                self.engine.abandon()
            finally:
                _RUNS.pop(self, None)
            raise
        self._gradients.__enter__()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.work.autocast.close()
            self.work.contexts.close()
            self._gradients.__exit__(kind, error, trace)
            close_run(self, error)
            if self.phase == "train" and error is None and (host := current_host()) is not None:
                host.ended(self.result)
            if error is None and self.hooks.exit_status is None and self.hooks.exit_error is None:
                self.report.raise_if_strict(self.result)
        finally:
            _RUNS.pop(self, None)

    def state_dict(self, shards: Mapping[str, Any] | None = None, *, weights_only: bool = False) -> dict[str, Any]:
        """Return one consistent snapshot of everything that a resumed run needs; see `heliograph.Run`."""
        from . import snapshot

        return snapshot.capture_weights(self) if weights_only else snapshot.capture(self, shards)

    def describe(self) -> str:
        """Return the plan of the run in a few lines."""
        from .plan import plan_of

        return plan_of(self)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each epoch; emit the events of the run and of its epochs."""
        if not self._entered:
            raise RuntimeError("Enter the run first: with trainer.run(...) as run: for _ in run.epochs(): ...")
        return loop.epochs(self)

    def batches(self, *, must_step: bool = True) -> Iterator[Any]:
        """Yield the batches of the epoch; emit their events and run the step boundaries.

        Each batch is read only when the loop requests it. If the loader has no length, no batch is known to be the
        last. With `precision="bf16"` or `"fp16"`, the body of the loop runs under the engine's autocast.

        Args:
            must_step: whether a batch without a step is an error. If not, its gradients remain for a later step.
        """
        from .own_loop import check_stepped, under_autocast

        self.work.reads_ahead = False
        self.work.batches = check_stepped(self, loop.batches(self), must_step=must_step)
        self.work.casts = _uses_autocast(self.engine)
        return under_autocast(self, self.work.batches) if self.work.casts else self.work.batches

    def step(self, loss: Loss, optimizer: str | None = None) -> None:
        """Run the backward pass of the current batch's loss and step the optimizer, unless the step is held.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch; or a sum with its count, `(loss_sum, count)`.
            optimizer: its name, if several were given by name. The loss leaves gradients only in the parameters of this
                optimizer. Call `step` once for each optimizer, and compute each loss after the previous step.

        Raises:
            TypeError: the loss is neither a tensor nor a sum with its count.
            ValueError: the loss is not a scalar; its count is not valid; there is no optimizer of that name; or its
                step with a loss of this batch is held.
        """
        if not self.work.in_hand:
            raise RuntimeError("run.step(loss) is for a batch of run.batches(): loop over them.")
        self.work.is_unstepped = False
        with self._outside_autocast():
            loop.step(self, loss, optimizer)

    def step_with_gradients(self, optimizer: str) -> None:
        """Step an optimizer with the gradients that your own loop has computed, without `run.step(loss)`.

        On several ranks the gradients are averaged first, unless `average_gradients` has done so. A collective.

        Args:
            optimizer: its name, one of `run.optimizers`.

        Raises:
            RuntimeError: fp16 or a plugin scales the loss, or a plugin holds the step: both need `run.step(loss)`.
            ValueError: there is no such optimizer.
        """
        from .own_loop import step_with_gradients

        with self._outside_autocast():
            step_with_gradients(self, optimizer)

    def average_gradients(self) -> None:
        """Average over all ranks the gradients that your own loop has computed, for example before clipping.

        Call it after the last backward pass and before `step_with_gradients`, which otherwise averages them itself. A
        collective: every rank must call it.
        """
        from .own_loop import average_gradients

        average_gradients(self)

    def result_or_raise(self, *, exits: bool = True) -> RunResult:
        """Return the result of a closed run, as `fit` does.

        Args:
            exits: whether to raise SystemExit if a plugin requested an exit status.

        Raises:
            SystemExit: a plugin such as `Preemption` requested an exit status.
            BaseException: an error that a plugin set to be raised at the end.
        """
        if exits and self.hooks.exit_status is not None:
            from .early_end import system_exit

            raise system_exit(self.hooks.exit_status, self.result)
        if self.hooks.exit_error is not None and self.result.status != "interrupted":
            raise self.hooks.exit_error
        return self.result

    def _outside_autocast(self) -> AbstractContextManager[None]:
        if not self.work.casts:
            return nullcontext()
        from .own_loop import outside_autocast

        return outside_autocast(self.engine.device)

    def _prepare(self) -> None:
        engine = self.engine
        engine.set_up(self.task, self.modules, self.optimizers)
        if self.phase == "train":
            self.stepping.forward = engine.bind(self.task.training_step)
            if text := begin_train_mode(self.modules):
                self.warn(text)
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            if self.modes is not None:
                self.modes.begin(engine)
        self.plugins.open(self)  # last: an earlier error leaves the trainer free
        try:
            self.control.open()
        except BaseException:  # after a Ctrl-C, too, the next run needs the plugins
            self.plugins.free()
            raise


def is_in_run(engine: LoopEngine) -> bool:
    return any(run.engine is engine for run in list(_RUNS))


def isolated_from_outer_runs() -> AbstractContextManager[Any]:
    """Isolate a nested run, for example in a handler, from the RNG and the autocast of the outer run."""
    outer = [run.engine for run, thread in list(_RUNS.items()) if thread == get_ident()]
    contexts = ExitStack()
    if outer:
        from .data.rng import kept

        contexts.enter_context(kept())
    for engine in filter(_uses_autocast, outer):
        contexts.enter_context(torch.autocast(engine.device.type, enabled=False, cache_enabled=False))
    return contexts


def _uses_autocast(engine: LoopEngine) -> bool:
    return not isinstance(engine.autocast(), nullcontext)
