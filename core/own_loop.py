"""Support for the user's own loop: errors for mistakes, autocast, and steps with precomputed gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..events.checks import known_names
from . import loop
from .context import RunContext
from .stepping.windows import OptimizerWindow, trained_parameters


def check_stepped(run: RunContext, batches: Iterator[Any], *, must_step: bool) -> Iterator[Any]:
    """Yield batches to the user's own loop.

    Raises:
        RuntimeError: `must_step` is set and the loop did not call `run.step(loss)` for a batch.
    """
    for batch in batches:
        run.work.is_unstepped = True
        yield batch
        if run.work.is_unstepped and must_step:
            remedy = "To skip one, call control.skip_batch(reason) in a handler of BatchStart."
            raise RuntimeError(f"run.step(loss) was not called for this batch. {remedy}")
        run.work.is_unstepped = False


def under_autocast(run: RunContext, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, each within the engine's autocast, until the loop continues or is left.

    The run holds no reference to this generator, so `break` closes it at once.
    """
    for batch in batches:
        with run.work.autocast as contexts:
            contexts.enter_context(run.engine.autocast())
            yield batch


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """Leave autocast for a backward pass and a step, and clear the cached casts of the old weights."""
    with torch.autocast(device.type, enabled=False, cache_enabled=False):
        yield
    torch.clear_autocast_cache()


def step_with_gradients(run: RunContext, optimizer: str) -> None:
    """Step an optimizer with the gradients that the user's own loop has computed.

    Raises:
        RuntimeError: fp16 or a plugin scales the loss, or a plugin holds the step: both need `run.step(loss)`.
        ValueError: there is no such optimizer.
    """
    control, window = run.control, run.stepping.by_name.get(optimizer)
    if window is None:
        raise ValueError(f"There is no optimizer {optimizer!r} to step.{known_names(optimizer, run.optimizers)}")
    why = None
    if "scaler" in run.engine.state_dict():
        why = "precision='fp16' scales the loss"
    elif (control.holds_step and not run.data.is_last_batch) or control.loss_scale != 1.0:
        why = "A plugin holds the step of this batch or scales its loss"
    elif window.counts is not None and window.size:
        why = "The window has micro-batches with counts"
    if why is not None:
        raise RuntimeError(
            f"{why}, so the optimizer cannot step with the gradients of your loop: call run.step(loss) instead of "
            f"loss.backward() and run.step_with_gradients; in a train_function, call iterator.step(loss)."
        )
    run.work.is_unstepped = False
    if run.control.is_shared:
        window.exchange = partial(_average_remaining, run, window)
        if not run.stepping.is_named:  # else the step averages them first
            window.exchange()
    loop.close_window(run, window)
    for parameter in trained_parameters(window.optimizer):
        run.work.averaged.pop(id(parameter), None)  # a gradient that is set to zero stays the same object


def average_gradients(run: RunContext) -> None:
    """Average over all ranks the gradients of every optimizer that the user's own loop has computed."""
    windows = run.stepping.by_name.values()
    parameters = [parameter for window in windows for parameter in trained_parameters(window.optimizer)]
    run.engine.exchange_gradients(parameters)
    run.work.averaged = {
        id(parameter): None if parameter.grad is None else ref(parameter.grad) for parameter in parameters
    }


def _average_remaining(run: RunContext, window: OptimizerWindow) -> None:
    parameters, averaged = trained_parameters(window.optimizer), run.work.averaged
    if not all(_is_averaged(parameter, averaged) for parameter in parameters):
        run.engine.exchange_gradients(parameters)


def _is_averaged(parameter: Tensor, averaged: Mapping[int, ReferenceType[Tensor] | None]) -> bool:
    if id(parameter) not in averaged:
        return False
    gradient = averaged[id(parameter)]
    return parameter.grad is (None if gradient is None else gradient())
