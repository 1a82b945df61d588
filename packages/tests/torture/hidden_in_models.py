"""State of modules that their `state_dict` does not show."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import sin
from typing import Any, ClassVar

import heliograph as h
import torch
from heliograph.packages.tests.torture.hidden import Hidden
from heliograph.packages.tests.torture.parts import Net, Parts
from torch import Tensor, nn


class Wrapper(nn.Module):
    """A module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Counting(Wrapper):
    """Counts its calls while it is trained."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        outputs: Tensor = self.model(inputs)
        return outputs * (1 + sin(self.calls) / 5)


class InAttribute(Hidden):
    """A counter that a module goes by."""

    row, place = "E3", "model"

    def hide(self, parts: Parts) -> None:
        parts.model = Counting(parts.model)


class Averaging(Wrapper):
    """Keeps a mean of its inputs in a tensor, in a buffer that is not saved or in none at all."""

    mean: Tensor

    def __init__(self, model: nn.Module, *, buffer: bool) -> None:
        super().__init__(model)
        if buffer:
            self.register_buffer("mean", torch.zeros(()), persistent=False)
        else:
            self.mean = torch.zeros(())

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean += (inputs.detach().nan_to_num().mean() - self.mean) / 4
        outputs: Tensor = self.model(inputs - self.mean)
        return outputs


class InBuffer(Hidden):
    """A buffer that is not saved."""

    row, place = "E3", "model"

    def hide(self, parts: Parts) -> None:
        parts.model = Averaging(parts.model, buffer=True)


class InTensor(Hidden):
    """A tensor that is an attribute of a module, and no buffer."""

    row, place = "own", "model"

    def hide(self, parts: Parts) -> None:
        parts.model = Averaging(parts.model, buffer=False)


class InForward(Hidden):
    """A forward that was put in the place of a module's own, and counts."""

    row, place = "own", "forward"

    def hide(self, parts: Parts) -> None:
        forward, calls = parts.net.activation.forward, [0]

        def counting(inputs: Tensor) -> Tensor:
            calls[0] += parts.net.training
            outputs: Tensor = forward(inputs)
            return outputs * (1 + sin(calls[0]) / 5)

        parts.net.activation.forward = counting


class InHook(Hidden):
    """A hook on a module that counts."""

    row, place = "E3", "hook"

    def hide(self, parts: Parts) -> None:
        calls = [0]

        def counted(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
            calls[0] += module.training
            return outputs + sin(calls[0])

        parts.net.first.register_forward_hook(counted)


class InGradient(Hidden):
    """A hook on a parameter's gradient that counts."""

    row, place = "own", "hook"

    def hide(self, parts: Parts) -> None:
        calls = [0]

        def counted(gradient: Tensor) -> Tensor:
            calls[0] += 1
            return gradient * (1 + sin(calls[0]) / 2)

        parts.net.last.weight.register_hook(counted)  # type: ignore[no-untyped-call]  # torch's


Change = Callable[[Net], object]


class Once(h.Plugin):
    """Does something to the model at one step: what was done is not in any state."""

    def __init__(self, step: int, change: Change, net: Net) -> None:
        self.step, self.act, self.net = step, change, net

    @h.on(h.StepEnd)
    def change(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == self.step:
            self.act(self.net)


class ByPlugin(Hidden, is_base=True):
    """Something that a plugin does to the model in mid-run."""

    @staticmethod
    @abstractmethod
    def change(net: Net) -> object:
        """Do it."""

    def hide(self, parts: Parts) -> None:
        parts.plugins["once"] = Once(3, self.change, parts.net)


class Frozen(ByPlugin):
    """requires_grad that a plugin changes in mid-run."""

    row, place = "E3", "once"

    @staticmethod
    def change(net: Net) -> object:
        return net.first.requires_grad_(False)


class Evaluating(ByPlugin):
    """eval() that a plugin calls in mid-run."""

    row, place = "E3", "once"
    wants: ClassVar[dict[str, Any]] = {"norm": True, "poison": None}

    @staticmethod
    def change(net: Net) -> object:
        return net.norm.eval()


class Swapped(ByPlugin):
    """A module that a plugin exchanges in mid-run."""

    row, place = "own", "once"

    @staticmethod
    def change(net: Net) -> object:
        net.activation = nn.ReLU()
        return net


class Momentum(ByPlugin):
    """A batch norm's momentum that a plugin changes in mid-run."""

    row, place = "own", "once"
    wants: ClassVar[dict[str, Any]] = {"norm": True, "poison": None}

    @staticmethod
    def change(net: Net) -> object:
        net.norm.momentum = 0.5  # type: ignore[assignment]  # no module knows it but a batch norm
        return net


class Anneals(h.Plugin):
    """Raises a dropout's share at every step."""

    def __init__(self, drop: nn.Dropout) -> None:
        self.drop = drop

    @h.on(h.StepEnd)
    def anneal(self, run: h.Run, event: h.StepEnd) -> None:
        self.drop.p = min(0.6, self.drop.p + 0.03)


class AnnealedDropout(Hidden):
    """A dropout's share that a plugin anneals."""

    row, place = "E3", "anneals"
    wants: ClassVar[dict[str, Any]] = {"dropout": 0.1}

    def hide(self, parts: Parts) -> None:
        parts.plugins["anneals"] = Anneals(parts.net.drop)
