"""Learning-rate schedulers as `fit` is given them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from ...events.checks import describe, known_names
from ...events.signatures import takes
from .optimizers import SINGLE

FORMS = (
    "scheduler= takes a scheduler, or a function that makes one from the optimizer, or from the optimizer and the "
    "planned steps: lambda optimizer, steps: CosineAnnealingLR(optimizer, steps)"
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A scheduler that is made when the number of steps of its run is known.

    Attributes:
        function: makes it, from the optimizer and that number.
        optimizer: whose learning rates it sets.
    """

    function: Callable[[Any, int], Any]
    optimizer: torch.optim.Optimizer

    def make(self, steps: int) -> Any:
        """Return the scheduler of a run of so many steps."""
        return _check_scheduler(self.function(self.optimizer, steps), self.optimizer, by=self.function)


def make_schedulers(
    scheduler: Any, optimizers: Mapping[str, torch.optim.Optimizer], *, several: bool
) -> dict[str, Any]:
    """Return the schedulers by the name of their optimizer, made from it where functions were given, or `Planned`.

    Args:
        scheduler: one, or several by name where the optimizers were given by name; None for none.
        optimizers: by name.
        several: whether they were given by name.

    Raises:
        TypeError: one is not a scheduler, or has no state that could be saved; there is one where several were to be
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
    return {name: _make_scheduler(each, optimizers[name]) for name, each in named.items() if each is not None}


def _make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler, made from the optimizer where a function was given, or what will make it."""
    if callable(scheduler) and not isinstance(scheduler, type) and not hasattr(scheduler, "step"):
        if takes_steps(scheduler):
            return Planned(scheduler, optimizer)
        if not takes(scheduler, 1):
            raise TypeError(f"{FORMS}; got {describe(scheduler)}{signature(scheduler)}.")
        return _check_scheduler(scheduler(optimizer), optimizer, by=scheduler)
    return _check_scheduler(scheduler, optimizer)


def takes_steps(function: Callable[..., Any]) -> bool:
    """Return whether a function needs a second argument besides the optimizer: one by position, without a default."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):  # one in C may have none
        return False
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position and each.default is Parameter.empty for each in parameters) == 2


def _check_scheduler(made: Any, optimizer: torch.optim.Optimizer, by: Callable[..., Any] | None = None) -> Any:
    if isinstance(made, type) or not callable(getattr(made, "step", None)):
        got = f"the class {made.__name__}" if isinstance(made, type) else repr(made)
        returned = "" if by is None else f", which {describe(by)} returned"
        raise TypeError(f"{FORMS}; got {got}{returned}.")
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
