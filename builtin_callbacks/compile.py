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
from ..events.checks import check_flag, describe_error
from ..plugins import Plugin, on

logger = logging.getLogger("heliograph")


class Compile(Plugin):
    """Run the modules of the task through `torch.compile`.

    A `loss_fn` of the task is compiled too; with `scope="step"` the whole training step is one compiled function. The
    modules remain the same objects, so checkpoints do not change. Code that cannot be compiled runs uncompiled, with a
    warning and a note in the result. Compiled code may round differently and draw other random numbers than plain code,
    so a resume with another setting is not bitwise identical.

    Args:
        scope: `modules`, or `step`, which also saves Python's overhead between the modules and the loss. A step that
            cannot be one compiled function, for example because it tracks values, runs as with `modules`, unless
            `fullgraph=False` allows several parts.
        fallback: continue uncompiled if the compiler fails; False fails the run.
        **options: options of `torch.compile`, such as `mode="max-autotune"`, `dynamic=True`, `fullgraph=True`,
            `backend="aot_eager"`.

    Raises:
        ValueError: the scope is unknown. With `step`, at the start of a run, also if the training step yields its
            losses or there are several ranks.
    """

    exclusive = ("compile",)

    def __init__(self, *, scope: Literal["modules", "step"] = "modules", fallback: bool = True, **options: Any) -> None:
        if scope not in ("modules", "step"):
            raise ValueError(f"Compile(scope=...) takes 'modules' or 'step', got {scope!r}.")
        check_flag("fallback", fallback)
        self.scope, self.fallback, self.options = scope, fallback, options
        self._restore: list[Callable[[], None]] = []

    @on(TrainStart, ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart | ValidationStart | TestStart | PredictStart) -> None:
        """Install the compiled code; compilation happens at the first call."""
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
        """Remove the compiled code."""
        self.close()

    def close(self) -> None:
        while self._restore:
            self._restore.pop()()

    def _compile_module(self, run: Run, name: str, module: nn.Module) -> None:
        previous = module._compiled_call_impl
        plain: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:  # our own frame: the compiler skips frames of torch.nn
            return plain(*args, **kwargs)

        compiled = torch.compile(call, **self.options)

        def restore() -> None:
            module._compiled_call_impl = previous

        def fall_back() -> None:
            module._compiled_call_impl = None

        module._compiled_call_impl = self._with_fallback(run, name, compiled, plain, fall_back)
        self._restore.append(restore)

    def _compile_function(self, run: Run, loss_fn: Callable[..., Any]) -> None:
        def restore() -> None:
            run.task.loss_fn = loss_fn

        compiled = self._with_fallback(run, "loss_fn", torch.compile(loss_fn, **self.options), loss_fn, restore)
        run.task.loss_fn = update_wrapper(compiled, loss_fn, (), ())  # a resume compares the wrapped function
        self._restore.append(restore)

    def _compile_step(self, run: Run) -> None:
        if isgeneratorfunction(run.task.training_step):
            reason = "the training step yields a loss for each optimizer, with steps in between"
        elif run.engine.world_size > 1:
            reason = f"{run.engine.world_size} ranks exchange gradients, which cannot be part of the compiled function"
        else:
            reason = ""
        if reason:
            raise ValueError(f'Compile(scope="step") cannot work here: {reason}. Use scope="modules".')
        plain = run.stepping.forward

        def call(run: Any, batch: Any) -> Any:  # its name appears in the compiler's messages
            return plain(run, batch)

        compiled = torch.compile(call, **{"fullgraph": True, **self.options})
        run.stepping.forward = self._with_fallback(run, "the whole training step", compiled, plain, lambda: None)

    def _with_fallback(
        self,
        run: Run,
        name: str,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        fall_back: Callable[[], None],
    ) -> Callable[..., Any]:
        if not self.fallback:
            return compiled
        # imported here because it takes a second; the two errors have no common base
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        chosen = compiled

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal chosen
            try:
                return chosen(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                cause = error.__cause__ if isinstance(error, FailOnRecompileLimitHit) else error
                lines = [line.strip() for line in describe_error(cause or error).splitlines() if line.strip()]
                reason = " ".join(lines[:2])  # the second line names the cause
            chosen = plain  # callers may keep this function until the end of the epoch
            fall_back()
            run.note(f"{name} runs uncompiled: {reason}")
            logger.warning("%s runs uncompiled: %s", name, reason)
            return plain(*args, **kwargs)

        return guarded
