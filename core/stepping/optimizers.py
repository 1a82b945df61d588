"""Optimizers and schedulers as `fit` is given them: objects or functions that make them, one or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ..engines.options import modules_of

Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer]
SINGLE = "optimizer"  # the name of one that was given without a name, and of its scheduler


def make_optimizer(optimizer: Optimizer | None, task: Any) -> torch.optim.Optimizer:
    """Return the one optimizer of a training, made from the task's parameters where a function was given.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: it holds no parameter of the task.
    """
    whole = [parameter for module in modules_of(task).values() for parameter in module.parameters()]
    return check_optimizer(optimizer, whole, task, "optimizer")


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer that require gradients now."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def check_optimizer(
    optimizer: Optimizer | None, parameters: list[nn.Parameter], task: Any, called: str
) -> torch.optim.Optimizer:
    """Return the optimizer, made from the parameters where a function was given."""
    made = optimizer
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        method = f"{type(task).__name__}.configure_optimizers"
        uncalled = f" Nothing calls {method}: give what it returns, optimizer=..., scheduler=..."
        raise TypeError(
            f"{'' if called == 'optimizer' else f'The {called}: '}optimizer= takes a torch optimizer, or a function "
            f"that makes one from parameters, got {optimizer!r}.{uncalled * hasattr(task, 'configure_optimizers')}"
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, which the loop does not give it.")
    own = {id(parameter) for module in modules_of(task).values() for parameter in module.parameters()}
    if own and not own & held_parameters(made):
        raise ValueError(f"The {called} holds no parameter of the task: make it from the model that is trained here.")
    return made


def switched(optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers with `train()` and `eval()`, such as schedule-free ones."""
    return [each for each in optimizers if callable(getattr(each, "train", None)) and hasattr(each, "eval")]


def held_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
