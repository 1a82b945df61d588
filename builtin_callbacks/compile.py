"""Compile the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import update_wrapper
from inspect import isgeneratorfunction
from typing import Any, Literal

import torch
from torch import nn

from ..events import Lane, PredictStart, Run, RunClosed, TestStart, TrainStart, ValidationStart
from ..events.checks import check_flag
from ..events.errors import describe_error
from ..plugins import Plugin, on

logger = logging.getLogger("heliograph")


class Compile(Plugin):
    """Run the task's modules through `torch.compile`.

    The `loss_fn` of a task that has one is compiled too; with `scope="step"` the whole training step, as one function.
    The modules stay the same objects, so checkpoints are the same with and without it. What cannot be compiled runs as
    it is: a warning and `result.notes` say why. Compiled code may round differently, and draw other random numbers,
    than plain code: a run that is resumed without it is not bit for bit the same.

    Args:
        scope: `modules`, or `step`, which saves the time that Python takes between the modules and the loss. The step
            of a task that tracks values, or does anything else that the compiler cannot make part of one function,
            runs as with `modules`, unless `fullgraph=False` lets it come in several parts.
        fallback: continue uncompiled where the compiler fails; without it, that fails the run.
        **options: of `torch.compile`, such as `mode="max-autotune"`, `dynamic=True`, `fullgraph=True`,
            `backend="aot_eager"`.

    Raises:
        ValueError: the scope is unknown; with `step`, in a run, the training step yields its losses or there are
            several ranks.
    """

    exclusive = ("compile",)

    def __init__(self, *, scope: Literal["modules", "step"] = "modules", fallback: bool = True, **options: Any) -> None:
        if scope not in ("modules", "step"):
            raise ValueError(f"Compile(scope=...) is 'modules' or 'step', got {scope!r}.")
        check_flag("fallback", fallback)
        self.scope, self.fallback, self.options = scope, fallback, options
        self._restore: list[Callable[[], None]] = []

    @on(TrainStart, ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart | ValidationStart | TestStart | PredictStart) -> None:
        """Put the compiled code in place; it is made at the first call."""
        if self._restore:
            return
        for name, module in run.modules.items():
            self._compile_module(run, name, module)
        loss_fn = getattr(run.task, "loss_fn", None)
        if callable(loss_fn) and not isinstance(loss_fn, nn.Module):
            self._compile_function(run, loss_fn)
        if self.scope == "step" and isinstance(event, TrainStart):
            self._compile_step(run)

    @on(RunClosed, lane=Lane.TRANSFORM)
    def end(self, run: Run, event: RunClosed) -> None:
        """Take the compiled code away."""
        self.close()

    def close(self) -> None:
        """Take the compiled code away."""
        while self._restore:
            self._restore.pop()()

    def _compile_module(self, run: Run, name: str, module: nn.Module) -> None:
        former = module._compiled_call_impl
        plain: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:  # a frame of ours: the compiler passes over those of torch.nn
            return plain(*args, **kwargs)

        compiled = torch.compile(call, **self.options)

        def give_back() -> None:
            module._compiled_call_impl = former

        def give_up() -> None:
            module._compiled_call_impl = None

        module._compiled_call_impl = self._guarded(run, name, compiled, plain, give_up)
        self._restore.append(give_back)

    def _compile_function(self, run: Run, loss_fn: Callable[..., Any]) -> None:
        def give_back() -> None:
            run.task.loss_fn = loss_fn

        compiled = self._guarded(run, "loss_fn", torch.compile(loss_fn, **self.options), loss_fn, give_back)
        run.task.loss_fn = update_wrapper(compiled, loss_fn, (), ())  # a checkpoint compares what is wrapped
        self._restore.append(give_back)

    def _compile_step(self, run: Run) -> None:
        if isgeneratorfunction(run.task.training_step):
            why = "the training step yields a loss for each optimizer, and steps in between"
        elif run.engine.world_size > 1:
            why = f"{run.engine.world_size} ranks exchange gradients, which is prepared outside of what is compiled"
        else:
            why = ""
        if why:
            raise ValueError(f'Compile(scope="step") cannot work here: {why}. Take scope="modules".')
        plain = run.stepping.forward

        def call(run: Any, batch: Any) -> Any:  # named in what the compiler says
            return plain(run, batch)

        compiled = torch.compile(call, **{"fullgraph": True, **self.options})
        run.stepping.forward = self._guarded(run, "the training step as a whole", compiled, plain, lambda: None)

    def _guarded(
        self, run: Run, name: str, compiled: Callable[..., Any], plain: Callable[..., Any], give_up: Callable[[], None]
    ) -> Callable[..., Any]:
        """Return a function that continues uncompiled, for good, where the compiler fails."""
        if not self.fallback:
            return compiled
        # imported here, as that takes a second; the error at the limit of recompilations is of no common base
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        chosen = compiled

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal chosen
            try:
                return chosen(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                says_why = error.__cause__ if isinstance(error, FailOnRecompileLimitHit) else error
                lines = [line.strip() for line in describe_error(says_why or error).splitlines() if line.strip()]
                reason = " ".join(lines[:2])  # the second names the cause
            chosen = plain  # whoever calls this keeps it until the end of the epoch
            give_up()
            run.note(f"{name} runs uncompiled: {reason}")
            logger.warning("%s runs uncompiled: %s", name, reason)
            return plain(*args, **kwargs)

        return guarded
