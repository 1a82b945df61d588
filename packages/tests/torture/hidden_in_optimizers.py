"""State of optimizers and schedulers that their `state_dict` does not show."""

from __future__ import annotations

from math import sin
from typing import Any, ClassVar

import torch
from heliograph.packages.tests.torture.hidden import Hidden
from heliograph.packages.tests.torture.parts import Parts
from torch import Tensor
from torch.optim import lr_scheduler


class Warming(torch.optim.SGD):
    """Counts its steps in an attribute."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + sin(self.calls) / 2)
        return super().step(closure)


class InOptimizer(Hidden):
    """A counter that an optimizer goes by."""

    row, place = "E3", "optimizer"

    def hide(self, parts: Parts) -> None:
        parts.optimizer = lambda parameters: Warming(parameters, lr=0.1)


class InOptimizerHook(Hidden):
    """A hook on an optimizer that counts."""

    row, place = "own", "optimizer"

    def hide(self, parts: Parts) -> None:
        calls = [0]

        def counted(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
            calls[0] += 1
            for parameter in optimizer.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + sin(calls[0]) / 2)

        def made(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            optimizer.register_step_pre_hook(counted)
            return optimizer

        parts.optimizer = made


class Forgetful(lr_scheduler.LRScheduler):
    """Goes by an attribute that its state leaves out."""

    turns = 0

    def get_lr(self) -> list[float | Tensor]:
        self.turns += 1
        return [rate * (1 + sin(self.turns) / 2) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {name: value for name, value in state.items() if name != "turns"}


class InScheduler(Hidden):
    """A counter that a scheduler goes by."""

    row, place = "E3", "scheduler"
    wants: ClassVar[dict[str, Any]] = {"scheduler": "CosineAnnealingLR"}

    def hide(self, parts: Parts) -> None:
        parts.scheduler = lambda optimizer: Forgetful(optimizer)


class InLambda(Hidden):
    """A counter that the function of a LambdaLR closes over."""

    row, place = "E3", "scheduler"
    wants: ClassVar[dict[str, Any]] = {"scheduler": "LambdaLR"}

    def hide(self, parts: Parts) -> None:
        calls = [0]

        def factor(step: int) -> float:
            calls[0] += 1
            return 1 + sin(calls[0]) / 2

        parts.scheduler = lambda optimizer: lr_scheduler.LambdaLR(optimizer, factor)
