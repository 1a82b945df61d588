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
_REMEDY = "Change the model before fit, which makes the optimizer of its parameters."
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
        raise TypeError(
            f"{'' if called == 'optimizer' else f'The {called}: '}optimizer= takes a torch optimizer, or a function "
            f"that makes one from parameters, got {optimizer!r}.{_own_optimizers(task)}"
        )
    closure = signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise ValueError(f"{type(made).__name__} needs a closure for every step, which the loop does not give it.")
    own = _ids(parameter for module in modules_of(task).values() for parameter in module.parameters())
    if own and not own & held_parameters(made):
        raise ValueError(f"The {called} holds no parameter of the task: make it from the model that is trained here.")
    return made


def switched(optimizers: Iterable[Any]) -> list[Any]:
    """Return the optimizers with `train()` and `eval()`, such as schedule-free ones."""
    return [each for each in optimizers if callable(getattr(each, "train", None)) and hasattr(each, "eval")]


def _own_optimizers(task: Any) -> str:
    kind = type(task).__name__
    is_there = hasattr(task, "configure_optimizers")
    return f" Nothing calls {kind}.configure_optimizers: give what it returns, optimizer=..., scheduler=..." * is_there


class GivenModules:
    """The modules of a task before the handlers of `TrainStart`, which come after its optimizers are made.

    Args:
        task: the task.
    """

    def __init__(self, task: Any) -> None:
        self._task, self._modules = task, modules_of(task)
        self._parameters = [each for module in self._modules.values() for each in module.parameters()]

    def check(self, optimizers: Iterable[torch.optim.Optimizer], world_size: int) -> None:
        """Raise ValueError where a handler has put modules into the task that would not be trained."""
        now = modules_of(self._task)
        for name in now.keys() | self._modules.keys():
            if now.get(name) is not self._modules.get(name):
                raise ValueError(
                    f"A handler of TrainStart replaced, added or removed the task's module {name!r}: the run trains, "
                    f"moves and saves those that fit was given. {_REMEDY}"
                )
        before, held = _ids(self._parameters), set().union(*map(held_parameters, optimizers))
        added = {
            f"{name}.{part}": each
            for name, module in now.items()
            for part, each in module.named_parameters()
            if id(each) not in before and each.requires_grad
        }
        names = [name for name, each in added.items() if world_size > 1 or id(each) not in held]
        if names:
            what = "no optimizer holds" if world_size == 1 else "the ranks would not exchange gradients of"
            raise ValueError(
                f"A handler of TrainStart put parameters into the task that {what}: {', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}. They would not be trained. {_REMEDY}"
                + (" Or add them there: run.optimizer.add_param_group({'params': [...]})." if world_size == 1 else "")
            )


def _ids(parameters: Iterable[Any]) -> set[int]:
    return {id(parameter) for parameter in parameters}


def held_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return _ids(parameter for group in optimizer.param_groups for parameter in group["params"])
