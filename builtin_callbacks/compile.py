"""Compile the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..events import Lane, PredictStart, Run, RunClosed, TestStart, TrainStart, ValidationStart
from ..events.checks import check_flag
from ..events.errors import describe_error
from ..plugins import Plugin, on

logger = logging.getLogger("heliograph")


class Compile(Plugin):
    """Run the task's modules through `torch.compile`.

    The `loss_fn` of a task that has one is compiled too. The modules stay the same objects, so checkpoints are the same
    with and without it. What cannot be compiled runs as it is: a warning and `result.notes` say why. Compiled code may
    round differently, and draw other random numbers, than plain code: a run that is resumed without it is not bit for
    bit the same.

    Args:
        fallback: continue uncompiled where the compiler fails; without it, that fails the run.
        **options: of `torch.compile`, such as `mode="max-autotune"`, `dynamic=True`, `fullgraph=True`,
            `backend="aot_eager"`.
    """

    exclusive = ("compile",)

    def __init__(self, *, fallback: bool = True, **options: Any) -> None:
        check_flag("fallback", fallback)
        self.fallback, self.options = fallback, options
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

        run.task.loss_fn = self._guarded(run, "loss_fn", torch.compile(loss_fn, **self.options), loss_fn, give_back)
        self._restore.append(give_back)

    def _guarded(
        self, run: Run, name: str, compiled: Callable[..., Any], plain: Callable[..., Any], give_up: Callable[[], None]
    ) -> Callable[..., Any]:
        """Return a function that continues uncompiled, for good, where the compiler fails."""
        if not self.fallback:
            return compiled
        from torch._dynamo.exc import TorchDynamoException  # importing the compiler takes a second

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:
                lines = [line.strip() for line in describe_error(error).splitlines() if line.strip()]
                reason = " ".join(lines[:2])  # the second names the cause
            give_up()
            run.note(f"{name} runs uncompiled: {reason}")
            logger.warning("%s runs uncompiled: %s", name, reason)
            return plain(*args, **kwargs)

        return guarded
