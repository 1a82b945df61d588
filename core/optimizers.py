"""Optimizers and schedulers as `fit` is given them: objects or functions that make them, one or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ..events.checks import known_names
from .task import modules_of

Optimizer = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer]
SINGLE = "optimizer"  # the name of one that was given without a name, and of its scheduler


def made_optimizers(optimizer: Optimizers | None, task: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name, made from the task's parameters where functions were given.

    Raises:
        TypeError: one is no optimizer, or its name no string.
        ValueError: one holds no parameter of the task, or one that another holds too; a name cannot be used.
    """
    if not isinstance(optimizer, Mapping):
        whole = [parameter for module in modules_of(task).values() for parameter in module.parameters()]
        return {SINGLE: _made_optimizer(optimizer, whole, task, "optimizer")}
    if not optimizer:
        raise ValueError('optimizer={} holds no optimizer: give one by name for each loss, {"generator": ...}.')
    made = {}
    for name, each in optimizer.items():
        if not isinstance(name, str):
            raise TypeError(f"The names in optimizer={{...}} are strings, got {name!r}.")
        if not name or "/" in name:
            raise ValueError(f"The name of an optimizer becomes part of metric names: no '/' in {name!r}.")
        made[name] = _made_optimizer(each, _own_parameters(name, each, task), task, f"optimizer {name!r}")
    _check_apart(made)
    return made


def made_schedulers(
    scheduler: Any, optimizers: Mapping[str, torch.optim.Optimizer], *, several: bool
) -> dict[str, Any]:
    """Return the schedulers by the name of their optimizer, made from it where functions were given.

    Args:
        scheduler: one, or several by name where the optimizers were given by name; None for none.
        optimizers: by name.
        several: whether they were given by name.

    Raises:
        TypeError: one is no scheduler, or has no state that could be saved; there is one where several were to be
            given, or several where one was.
        ValueError: one belongs to another optimizer, or to none.
    """
    if scheduler is None:
        return {}
    if several != isinstance(scheduler, Mapping):
        given = "by name, so are their schedulers: " if several else "without a name, so is its scheduler: "
        form = 'scheduler={"generator": ...}' if several else "scheduler=..."
        raise TypeError(f"The optimizer was given {given}{form}; got {scheduler!r}.")
    named = dict(scheduler) if several else {SINGLE: scheduler}
    for name in named.keys() - optimizers.keys():
        raise ValueError(f"The scheduler {name!r} has no optimizer of this name.{known_names(str(name), optimizers)}")
    return {name: _made_scheduler(each, optimizers[name]) for name, each in named.items() if each is not None}


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer that require gradients now."""
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _made_optimizer(
    optimizer: Optimizer | None, parameters: list[nn.Parameter], task: Any, called: str
) -> torch.optim.Optimizer:
    """Return the optimizer, made from the parameters where a function was given."""
    made = optimizer
    if callable(made) and not isinstance(made, torch.optim.Optimizer):
        made = made(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"{'' if called == 'optimizer' else f'The {called}: '}optimizer= takes a torch optimizer, or a function "
            f"that makes one from parameters, got {optimizer!r}."
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, which the loop does not give it.")
    own = _ids(parameter for module in modules_of(task).values() for parameter in module.parameters())
    if own and not own & _held(made):
        raise ValueError(f"The {called} holds no parameter of the task: make it from the model that is trained here.")
    return made


def _own_parameters(name: str, optimizer: Any, task: Any) -> list[nn.Parameter]:
    """Return the parameters that a function is to make the optimizer of a name from."""
    module = getattr(task, name, None)
    if isinstance(module, nn.Module):
        return list(module.parameters())
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer={{{name!r}: ...}} is a function that makes an optimizer, and {type(task).__name__} has no "
            f"module {name!r} to take the parameters from.{known_names(name, modules_of(task))} Or give an optimizer, "
            f"made from the parameters that you choose."
        )
    return []


def _check_apart(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raise ValueError where two optimizers hold the same parameter."""
    owners: dict[int, str] = {}
    for name, optimizer in optimizers.items():
        for key in _held(optimizer):
            if (other := owners.setdefault(key, name)) != name:
                raise ValueError(
                    f"The optimizers {other!r} and {name!r} hold the same parameter, in which the gradients of their "
                    f"losses would mix: give it to one of them."
                )


def _ids(parameters: Iterable[Any]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return _ids(parameter for group in optimizer.param_groups for parameter in group["params"])


def _made_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler, made from the optimizer where a function was given."""
    made = scheduler
    if callable(made) and not isinstance(made, type) and not hasattr(made, "step"):
        made = made(optimizer)
    if isinstance(made, type) or not callable(getattr(made, "step", None)):
        raise TypeError(f"scheduler= takes a scheduler, or a function that makes one from the optimizer, got {made!r}.")
    lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if lacking:
        raise TypeError(
            f"The scheduler {type(made).__name__} has no {' and no '.join(lacking)}, so no checkpoint could hold its "
            f"state. Inherit from torch.optim.lr_scheduler.LRScheduler; or write state_dict(), which returns a dict of "
            f"plain values, and load_state_dict(state), which takes it back."
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError("The scheduler belongs to another optimizer than the one that fit was given.")
    return made
