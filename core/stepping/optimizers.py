"""The `optimizer=` argument of `fit`: an optimizer, a function that makes one, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ..engines.options import modules_of

Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer]
SINGLE = "optimizer"  # the name of an optimizer without a name, and of its scheduler


def make_optimizer(optimizer: Optimizer | None, task: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a training with a single one.

    Raises:
        TypeError: it is not an optimizer.
        ValueError: it has no parameter of the task.
    """
    parameters = [parameter for module in modules_of(task).values() for parameter in module.parameters()]
    return check_optimizer(optimizer, parameters, task, "optimizer")


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def check_optimizer(
    optimizer: Optimizer | None, parameters: list[nn.Parameter], task: Any, called: str
) -> torch.optim.Optimizer:
    made = optimizer
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        method = f"{type(task).__name__}.configure_optimizers"
        uncalled = f" {method} is not called: pass its results as optimizer=... and scheduler=..."
        raise TypeError(
            f"{'' if called == 'optimizer' else f'The {called}: '}optimizer= takes a torch optimizer, or a function "
            f"that makes one from parameters, got {optimizer!r}.{uncalled * hasattr(task, 'configure_optimizers')}"
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, but the loop passes none.")
    trained = {id(parameter) for module in modules_of(task).values() for parameter in module.parameters()}
    if trained and not trained & held_parameters(made):
        raise ValueError(f"The {called} has no parameter of the task: make it from the parameters of your model.")
    return made


def switched(optimizers: Iterable[Any]) -> list[Any]:
    # Schedule-free optimizers have `train()` and `eval()`.
    return [
        optimizer
        for optimizer in optimizers
        if callable(getattr(optimizer, "train", None)) and hasattr(optimizer, "eval")
    ]


def held_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    # Ids, because tensors compare by element.
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
