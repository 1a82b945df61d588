"""The `scheduler=` argument of `fit`, and schedules with a warm-up."""

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
from .windows import SINGLE

FORMS = (
    "scheduler= takes a scheduler, or a function, such as lambda optimizer, steps: OneCycleLR(optimizer, 0.1, steps)"
)


@dataclass(frozen=True, slots=True)
class PlannedScheduler:
    """A scheduler that is made when the number of steps of its run is known.

    Attributes:
        function: makes it from the optimizer and the number of steps.
        optimizer: the optimizer whose learning rates it sets.
    """

    function: Callable[[Any, int], Any]
    optimizer: torch.optim.Optimizer

    def make(self, steps: int) -> Any:
        return _check_scheduler(self.function(self.optimizer, steps), self.optimizer, by=self.function)


def make_schedulers(
    scheduler: Any, optimizers: Mapping[str, torch.optim.Optimizer], *, several: bool
) -> dict[str, Any]:
    """Return the schedulers by optimizer name, made from functions if necessary, or `PlannedScheduler`.

    Args:
        scheduler: a scheduler, or several by name if the optimizers have names; None for none.
        optimizers: by name.
        several: whether the optimizers have names.

    Raises:
        TypeError: a value is not a scheduler or has no state to save; or one was given for several optimizers, or
            several for one.
        ValueError: a scheduler belongs to another optimizer, or to none.
    """
    if scheduler is None:
        return {}
    if several != isinstance(scheduler, Mapping):
        form = 'a dict by name for several optimizers, {"generator": ...}' if several else "one for a single optimizer"
        raise TypeError(f"scheduler= takes {form}; got {scheduler!r}.")
    named = dict(scheduler) if several else {SINGLE: scheduler}
    for name in named.keys() - optimizers.keys():
        raise ValueError(f"There is no optimizer {name!r} for the scheduler.{known_names(str(name), optimizers)}")
    return {name: _make_scheduler(maker, optimizers[name]) for name, maker in named.items() if maker is not None}


def _make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    if callable(scheduler) and not isinstance(scheduler, type) and not hasattr(scheduler, "step"):
        if takes_steps(scheduler):
            return PlannedScheduler(scheduler, optimizer)
        return _check_scheduler(scheduler(optimizer), optimizer, by=scheduler)
    return _check_scheduler(scheduler, optimizer)


def takes_steps(function: Callable[..., Any]) -> bool:
    # True if it has two positional parameters without a default: the optimizer and the steps.
    parameters = signature(function).parameters.values()
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in by_position and parameter.default is Parameter.empty for parameter in parameters) == 2


def _check_scheduler(made: Any, optimizer: torch.optim.Optimizer, by: Callable[..., Any] | None = None) -> Any:
    if isinstance(made, type) or not callable(getattr(made, "step", None)):
        returned = "" if by is None else f" from {describe(by)}"
        raise TypeError(f"{FORMS}; got {made!r}{returned}.")
    lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if lacking:
        raise TypeError(
            f"The scheduler {type(made).__name__} has no {' and no '.join(lacking)}, so its state cannot be saved: "
            f"inherit from torch.optim.lr_scheduler.LRScheduler, or define state_dict() and load_state_dict(state)."
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError("The scheduler belongs to a different optimizer than the one passed to fit.")
    return made


class WarmupScheduler(LRScheduler):
    """A warm-up, then a decay: a function of the number of completed steps, so that any resume is exact.

    If the loaded state is of a run of another length, the rate follows the new length at once.

    Args:
        optimizer: the optimizer; its learning rates are the highest ones.
        steps: optimizer steps of the run.
        warmup: the number of steps with a lower rate at the start.
        end: the rate after the last step, as a fraction of the highest.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, warmup: int, end: float) -> None:
        self.steps, self.warmup, self.end = steps, warmup, end
        super().__init__(optimizer)

    def factor(self, done: int) -> float:
        """Return the rate of the step after `done` steps, as a fraction of the highest."""
        if done < self.warmup:
            return (done + 1) / (self.warmup + 1)
        part = (done - self.warmup) / (self.steps - self.warmup)
        return self.end if part >= 1 else self.end + (1 - self.end) * self.decay(part)

    @abstractmethod
    def decay(self, part: float) -> float:
        """Return a factor from 1 to 0 for a fraction from 0 to 1 of the steps after the warm-up."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the next step."""
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and keep the length of this run."""
        new_length = self.steps, self.warmup
        super().load_state_dict(state_dict)
        if self.steps != new_length[0]:
            self.steps, self.warmup = new_length
            self._last_lr = self.get_lr()
            for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


class WarmupCosine(WarmupScheduler):
    """Decay along half a cosine: Loshchilov and Hutter, "SGDR", 2017, without restarts."""

    def decay(self, part: float) -> float:
        return (1 + cos(pi * part)) / 2


class WarmupLinear(WarmupScheduler):
    """Decay linearly."""

    def decay(self, part: float) -> float:
        return 1 - part


@dataclass(frozen=True)
class Warmup:
    """Makes a scheduler when the number of steps of the run is known.

    Attributes:
        kind: the class of the scheduler.
        warmup: a number of steps, or a fraction of the steps of the run.
        end: the rate after the last step, as a fraction of the highest.
    """

    kind: type[WarmupScheduler]
    warmup: float
    end: float

    def __post_init__(self) -> None:
        if isinstance(self.warmup, float):
            check_number("The warm-up as a fraction of the run", self.warmup, at_least=0, less_than=1)
        else:
            check_whole_number("The warm-up", self.warmup, of="steps", at_least=0, or_else="a fraction such as 0.03")
        check_number("end=", self.end, at_least=0, at_most=1)

    def __call__(self, optimizer: torch.optim.Optimizer, steps: int) -> WarmupScheduler:
        warmup = int(self.warmup)
        if isinstance(self.warmup, float):
            warmup = min(ceil(round(self.warmup * steps, 6)), steps - 1)
        if warmup >= steps:
            raise ValueError(f"The warm-up of {warmup} steps must be shorter than the run of {steps} steps.")
        return self.kind(optimizer, steps, warmup, self.end)


def warmup_cosine(warmup: int | float, *, end: float = 0.0) -> Warmup:
    """Create a scheduler for `fit(scheduler=...)`: linear warm-up, then half a cosine.

    The plugin `LearningRate("step")` steps it. With a warm-up of w steps, step i (from 1) has i / (w + 1) of the
    optimizer's learning rate. The rate then falls to `end` after the last step: Loshchilov and Hutter, "SGDR:
    Stochastic Gradient Descent with Warm Restarts", 2017, without restarts. The length is the planned number of steps,
    see `tuning.planned_steps`. If you resume with a longer run (`epochs=5` after 3), the rate follows the new length
    from that step on, and the result notes it.

    Args:
        warmup: a number of steps, such as 500, or a fraction of the run, such as 0.03.
        end: the rate after the last step, as a fraction of the optimizer's learning rate.

    Raises:
        ValueError: a number is out of range; or, when the run starts, its number of steps is unknown or not larger than
            the warm-up.
    """
    return Warmup(WarmupCosine, warmup, end)


def warmup_linear(warmup: int | float, *, end: float = 0.0) -> Warmup:
    """Create a scheduler for `fit(scheduler=...)`: linear warm-up, then linear decay.

    Except for the shape it equals `warmup_cosine`.

    Args:
        warmup: a number of steps, such as 500, or a fraction of the run, such as 0.03.
        end: the rate after the last step, as a fraction of the optimizer's learning rate.

    Raises:
        ValueError: a number is out of range; or, when the run starts, its number of steps is unknown or not larger than
            the warm-up.
    """
    return Warmup(WarmupLinear, warmup, end)
