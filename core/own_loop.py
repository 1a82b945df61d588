"""What only a loop of your own needs: mistakes in it as errors, and steps with gradients that it has computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..events.checks import known_names
from . import loop
from .context import RunContext
from .stepping.optimizers import trained_parameters
from .stepping.windows import OptimizerWindow


def check_stepped(run: RunContext, batches: Iterator[Any], *, must_step: bool) -> Iterator[Any]:
    """Yield batches to the user's own loop.

    Raises:
        RuntimeError: the loop did not call `run.step(loss)` for a batch, and must.
    """
    for batch in batches:
        run.work.is_unstepped = True
        yield batch
        if run.work.is_unstepped and must_step:
            raise RuntimeError(
                "run.step(loss) was not called for this batch. To skip one, call control.skip_batch(reason) in a "
                "handler of BatchStart."
            )
        run.work.is_unstepped = False


def under_autocast(run: RunContext, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, each within the engine's autocast, until the loop asks for the next one or is left.

    The run holds no reference to this generator, so `break` closes it at once.
    """
    for batch in batches:
        with run.work.autocast as contexts:
            contexts.enter_context(run.engine.autocast())
            yield batch


@contextmanager
def outside_autocast(device: torch.device) -> Iterator[None]:
    """Leave autocast for a backward pass and a step, and drop the casts of the weights that the step changes."""
    with torch.autocast(device.type, enabled=False, cache_enabled=False):
        yield
    torch.clear_autocast_cache()


def step_with_gradients(run: RunContext, optimizer: str) -> None:
    """Step an optimizer with the gradients that the user's own loop has computed.

    Raises:
        RuntimeError: fp16 or a plugin scales the loss, or a plugin holds the step, which takes `run.step(loss)`.
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
        why = "Micro-batches with counts are held in the window"
    if why is not None:
        raise RuntimeError(
            f"{why}, so the gradients that your loop has computed cannot be stepped with: call run.step(loss) instead "
            f"of loss.backward() and run.step_with_gradients; in a train_function, call iterator.step(loss)."
        )
    run.work.is_unstepped = False
    if run.control.is_shared:
        window.exchange = partial(_average_rest, run, window)
        if not run.stepping.is_named:  # else the step begins with it
            window.exchange()
    loop.close_window(run, window)
    for each in trained_parameters(window.optimizer):
        run.work.averaged.pop(id(each), None)  # a gradient that is set to zero stays the same object


def average_gradients(run: RunContext) -> None:
    """Average over all ranks the gradients that the user's own loop has computed, of every optimizer."""
    windows = run.stepping.by_name.values()
    parameters = [each for window in windows for each in trained_parameters(window.optimizer)]
    run.engine.exchange_gradients(parameters)
    run.work.averaged = {id(each): None if each.grad is None else ref(each.grad) for each in parameters}


def _average_rest(run: RunContext, window: OptimizerWindow) -> None:
    """Average the gradients of an optimizer over all ranks, unless they are those that were averaged."""
    parameters, averaged = trained_parameters(window.optimizer), run.work.averaged
    if not all(id(each) in averaged and _is(each.grad, averaged[id(each)]) for each in parameters):
        run.engine.exchange_gradients(parameters)


def _is(gradient: Tensor | None, averaged: ReferenceType[Tensor] | None) -> bool:
    return gradient is (None if averaged is None else averaged())
