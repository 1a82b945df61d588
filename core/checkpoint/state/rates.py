"""Scale learning rates: in an optimizer, and in the attributes that its scheduler computes them from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # in the groups of an optimizer, some set by schedulers
LISTS = ("base_lrs", "max_lrs", "_last_lr")  # of a scheduler


def base_rates(optimizers: Mapping[str, Any]) -> list[float]:
    # before a scheduler changes them
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
    # a tensor stays the same object, since captured graphs refer to it
    present = group[name]
    group[name] = present.copy_(torch.as_tensor(rate)) if isinstance(present, Tensor) else rate


def scale_scheduler(scheduler: Any, factor: float) -> None:
    """Multiply the rates that a scheduler computes learning rates from, also in nested schedulers.

    The `min_lr` of a plateau scheduler does not change.
    """
    if hasattr(scheduler, "eta_min"):
        scheduler.eta_min *= factor
    for name in LISTS:
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    for inner in getattr(scheduler, "_schedulers", ()):
        scale_scheduler(inner, factor)
