"""One run: the context and the pieces of a loop, the framework's or the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch

from ..events import Bus
from ..events.catalogue import Phase
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

_RUNS: WeakKeyDictionary[TrainRun, int] = WeakKeyDictionary()  # those that have begun and not ended; their threads


class TrainRun(RunContext):
    """One `fit`, `validate` or `test`.

    A context: leaving it emits `RunFailed` if an exception passes, and `RunClosed` always. Within it, your own
    loop is `for _ in run.epochs(): for batch in run.batches(): run.step(loss)`; then `run.result` says how it went.
    """

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
            if is_in_run(self.engine):
                raise RuntimeError(
                    f"This {type(self.engine).__name__} is used by another run: use another Trainer with its own "
                    f"engine."
                )
            self.plugins.check_free()
        except RuntimeError:
            self.hooks.closing.close()  # without an error: the engine stays in its group, for the run that uses it
            raise
        _RUNS[self] = get_ident()
        try:
            self._prepare()
        except BaseException as error:  # a run that does not begin has no other end
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
        """Return what will happen, in a few lines."""
        from .plan import plan_of

        return plan_of(self)

    def epochs(self) -> Iterator[int]:
        """Yield the index of each epoch; the run's and the epochs' events are emitted around them."""
        if not self._entered:
            raise RuntimeError(
                "A run begins with its context: with trainer.run(...) as run: for _ in run.epochs(): ..."
            )
        return loop.epochs(self)

    def batches(self, *, must_step: bool = True) -> Iterator[Any]:
        """Yield the batches of the epoch; their events and the step boundaries are emitted around them.

        Each is read when it is asked for, also of a loader without a length, of which no batch is known to be the last.
        With `precision="bf16"` or `"fp16"`, the body of the loop runs under the engine's autocast.

        Args:
            must_step: whether a batch for which nothing is stepped is an error; else its gradients stay for a later
                one.
        """
        from .own_loop import check_stepped, under_autocast

        self.work.reads_ahead = False
        self.work.batches = check_stepped(self, loop.batches(self), must_step=must_step)
        self.work.casts = _casts(self.engine)
        return under_autocast(self, self.work.batches) if self.work.casts else self.work.batches

    def step(self, loss: Loss, optimizer: str | None = None) -> None:
        """Take the loss of the current batch backward and step the optimizer, unless the step is held.

        Args:
            loss: a scalar tensor, averaged over the samples of the batch; or a sum with its count, `(loss_sum, count)`.
            optimizer: the name of the one that this loss is for, where several were given by name. Its parameters are
                the only ones that the loss leaves gradients in; call this once for each, and compute each loss after
                the step of the one before.

        Raises:
            TypeError: the loss is not a tensor, nor a sum with its count.
            ValueError: the loss is not a scalar; its count is not valid; there is no optimizer of that name, or its
                step with a loss of this batch is held.
        """
        if not self.work.in_hand:
            raise RuntimeError("run.step(loss) is for a batch of run.batches(): loop over them.")
        self.work.is_unstepped = False
        with self._outside_autocast():
            loop.step(self, loss, optimizer)

    def step_with_gradients(self, optimizer: str) -> None:
        """Step an optimizer with the gradients that your own loop has computed, without `run.step(loss)`.

        On several ranks they are averaged first, unless `average_gradients` has done it. A collective.

        Args:
            optimizer: its name, one of `run.optimizers`.

        Raises:
            RuntimeError: fp16 or a plugin scales the loss, or a plugin holds the step, which takes `run.step(loss)`.
            ValueError: there is no such optimizer.
        """
        from .own_loop import step_with_gradients

        with self._outside_autocast():
            step_with_gradients(self, optimizer)

    def average_gradients(self) -> None:
        """Average over all ranks the gradients that your own loop has computed, before it clips them, say.

        Call it after the last backward pass before `step_with_gradients`, which averages them itself where this was not
        called. A collective: every rank must call it.
        """
        from .own_loop import average_gradients

        average_gradients(self)

    def result_or_raise(self, *, exits: bool = True) -> RunResult:
        """Return the result of a run that is closed, as `fit` does.

        Args:
            exits: whether to raise SystemExit where a plugin asked for an exit status.

        Raises:
            SystemExit: a plugin such as `Preemption` asked for an exit status.
            BaseException: what a plugin left to be raised at the end.
        """
        if exits and self.hooks.exit_status is not None:
            from .early_end import as_exit

            raise as_exit(self.hooks.exit_status, self.result)
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
        self.plugins.open(self)  # last: what fails before leaves the trainer free
        try:
            self.control.open()
        except BaseException:  # a Ctrl-C, too, must leave the plugins to the next run
            self.plugins.free()
            raise


def is_in_run(engine: LoopEngine) -> bool:
    """Return whether an engine is in a run."""
    return any(run.engine is engine for run in list(_RUNS))


def apart_from_others() -> AbstractContextManager[Any]:
    """Isolate a nested run, for example in a handler: from the draws of the outer run, and from its autocast."""
    outer = [run.engine for run, thread in list(_RUNS.items()) if thread == get_ident()]
    contexts = ExitStack()
    if outer:
        from .data.draws.rng import kept

        contexts.enter_context(kept())
    for engine in filter(_casts, outer):
        contexts.enter_context(torch.autocast(engine.device.type, enabled=False, cache_enabled=False))
    return contexts


def _casts(engine: LoopEngine) -> bool:
    return not isinstance(engine.autocast(), nullcontext)
