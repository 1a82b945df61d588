"""Learning-rate schedulers as `fit` is given them, and those that warm up and then decay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from math import ceil, cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ...events.checks import check_number, check_whole_number, describe, known_names
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


class WarmupScheduler(LRScheduler):
    """A warm-up, then a decay: a function of the number of steps that are done, so that any resume is exact.

    With a state of a run of another length, the learning rate is at once what the present length makes of the position.

    Args:
        optimizer: whose learning rates it sets; as they are, they are the highest.
        steps: optimizer steps of the run.
        warmup: so many of them have a lower rate at the beginning.
        end: the rate after the last step, as a part of the highest.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, warmup: int, end: float) -> None:
        self.steps, self.warmup, self.end = steps, warmup, end
        super().__init__(optimizer)

    def factor(self, done: int) -> float:
        """Return the rate of the next step as a part of the highest, after so many steps."""
        if done < self.warmup:
            return (done + 1) / (self.warmup + 1)
        part = (done - self.warmup) / (self.steps - self.warmup)
        return self.end if part >= 1 else self.end + (1 - self.end) * self.decay(part)

    @abstractmethod
    def decay(self, part: float) -> float:
        """Return a number from 1 to 0, for a part of the steps after the warm-up from 0 to 1."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, with the length of this run."""
        given = self.steps, self.warmup
        super().load_state_dict(state_dict)
        if self.steps != given[0]:
            self.steps, self.warmup = given
            self._last_lr = self.get_lr()
            for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


class WarmupCosine(WarmupScheduler):
    """Falls along half a cosine: Loshchilov and Hutter, "SGDR", 2017, without restarts."""

    def decay(self, part: float) -> float:
        """See the base class."""
        return (1 + cos(pi * part)) / 2


class WarmupLinear(WarmupScheduler):
    """Falls along a line."""

    def decay(self, part: float) -> float:
        """See the base class."""
        return 1 - part


@dataclass(frozen=True)
class Warmup:
    """Makes a scheduler for a run, whose number of steps is then known.

    Attributes:
        kind: of scheduler.
        warmup: a number of steps, or a fraction of those of the run.
        end: the rate after the last step, as a part of the highest.
    """

    kind: type[WarmupScheduler]
    warmup: float
    end: float

    def __post_init__(self) -> None:
        """Raise ValueError unless the numbers make sense, TypeError where `fit` was given the function itself."""
        if isinstance(self.warmup, torch.optim.Optimizer):
            name = "warmup_" + self.kind.__name__.removeprefix("Warmup").lower()
            raise TypeError(f"scheduler={name} is not called: give it the length, as in scheduler={name}(0.03).")
        if isinstance(self.warmup, float):
            check_number("The warm-up as a fraction of the run", self.warmup, at_least=0, less_than=1)
        else:
            check_whole_number("The warm-up", self.warmup, of="steps", at_least=0, or_else="a fraction such as 0.03")
        check_number("end=", self.end, at_least=0, at_most=1)

    def __call__(self, optimizer: torch.optim.Optimizer, steps: int) -> WarmupScheduler:
        """Return the scheduler of a run of so many steps."""
        warmup = int(self.warmup)
        if isinstance(self.warmup, float):
            warmup = min(ceil(round(self.warmup * steps, 6)), steps - 1)
        if warmup >= steps:
            raise ValueError(f"A warm-up of {warmup} steps is as long as the run, which plans {steps} steps.")
        return self.kind(optimizer, steps, warmup, self.end)


def warmup_cosine(warmup: int | float, *, end: float = 0.0) -> Warmup:
    """Return what `fit(scheduler=...)` takes for a learning rate that warms up, then falls along half a cosine.

    The plugin `LearningRate("step")` steps it. With w steps of warm-up the i-th step, from 1, has i / (w + 1) of the
    optimizer's own rate; after that the rate falls from that to its end after the last step: Loshchilov and Hutter,
    "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without restarts. The length is that which is planned,
    as `tuning.planned_steps` says. A run that resumes and is longer (`epochs=5` after 3) takes the rate that the new
    length has at that step, and the result notes it.

    Args:
        warmup: a number of steps, such as 500, or a fraction of those of the run, such as 0.03.
        end: the rate after the last step, as a part of the optimizer's own.

    Raises:
        TypeError: `fit` was given the function itself, `scheduler=warmup_cosine`.
        ValueError: a number is out of its range; when the run is made, its number of steps is not known before, or the
            warm-up is not shorter.
    """
    return Warmup(WarmupCosine, warmup, end)


def warmup_linear(warmup: int | float, *, end: float = 0.0) -> Warmup:
    """Return what `fit(scheduler=...)` takes for a learning rate that warms up, then falls along a line.

    All but the shape is as in `warmup_cosine`.

    Args:
        warmup: a number of steps, such as 500, or a fraction of those of the run, such as 0.03.
        end: the rate after the last step, as a part of the optimizer's own.

    Raises:
        ValueError: a number is out of its range; when the run is made, its number of steps is not known before, or the
            warm-up is not shorter.
    """
    return Warmup(WarmupLinear, warmup, end)
