"""Learning rates times a factor, in an optimizer and in all that its scheduler computes them from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # in the groups of an optimizer: schedulers keep theirs, too
LISTS = ("base_lrs", "max_lrs", "_last_lr")  # of a scheduler


def base_rates(optimizers: Mapping[str, Any]) -> list[float]:
    """Return the learning rate of each parameter group, without what a scheduler makes of it."""
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    return [float(group.get("initial_lr", group.get("lr", 0.0))) for group in groups]


def scale_optimizer(optimizer: Any, *factors: float) -> None:
    """Multiply the learning rates of an optimizer by one factor, or by one for each parameter group."""
    groups = optimizer.param_groups
    for group, factor in zip(groups, factors if len(factors) > 1 else factors * len(groups), strict=True):
        for name in RATES:
            if name in group and factor != 1.0:
                set_rate(group, name, group[name] * factor)


def set_rate(group: dict[str, Any], name: str, rate: Any) -> None:
    """Set one of the learning rates of a parameter group; a tensor stays the same object, since graphs hold it."""
    held = group[name]
    group[name] = held.copy_(torch.as_tensor(rate)) if isinstance(held, Tensor) else rate


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply what a scheduler computes rates from, and those of the schedulers in it.

    The `min_lr` of a plateau scheduler stays the bound that it is.
    """
    if hasattr(scheduler, "eta_min"):
        scheduler.eta_min *= factor
    for name in LISTS:
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_scheduler(inner, factor)
