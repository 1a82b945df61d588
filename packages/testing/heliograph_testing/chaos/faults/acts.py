"""The effects of faults on the process and its numbers, and the answers of plugins."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .fault import Fault

if TYPE_CHECKING:
    from heliograph import Run

SOON = 2  # batches after a fault in which a request counts as an answer
ANSWERS = frozenset({"stop", "skip_step", "skip_batch", "roll_back"})  # requests that answer bad numbers


@dataclass(frozen=True, slots=True)
class FaultAct:
    """A fault that has acted.

    Attributes:
        fault: the fault.
        where: the position in the training as text.
        text: the effect.
        batches: the finished batches before it.
        noticed_by: for a fault in numbers: the plugin that noticed it, or `the run` for an error; None if unnoticed.
        answer: the request, warning or error of that plugin.
    """

    fault: Fault
    where: str
    text: str
    batches: int
    noticed_by: str | None = None
    answer: str = ""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def strike(fault: Fault) -> None:
    # A kill or a hang does not return.
    if fault.kind == "kill":
        kill()
    elif fault.kind == "hang":
        while True:
            time.sleep(3600)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The numbers of requests, warnings and batches of a run when a number was changed."""

    requests: int
    warnings: int
    batches: int

    @classmethod
    def now(cls, run: Run) -> Baseline:
        return cls(run.control.history.total, len(run.report.warnings), run.progress.batches)

    def answer(self, run: Run) -> tuple[str, str] | None:
        # A request soon after the fault, or a warning.
        history = run.control.history
        new = list(history)[len(history) - (history.total - self.requests) :]
        for request in new if run.progress.batches - self.batches <= SOON else ():
            if request.verb in ANSWERS:
                return request.by, f"{request.verb}: {request.reason}"
        return ("a warning", run.report.warnings[self.warnings]) if len(run.report.warnings) > self.warnings else None


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def change(kind: str, run: Run, random: Random) -> str:
    """Change a number of a run, chosen by `random`, and return a description of the change."""
    if kind == "nan-loss":
        return _poison_loss(run.loss)
    weights = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    if kind == "bit-in-weight":
        return _flip("weight", weights, random)
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    if kind == "bit-in-gradient":
        return _flip("gradient", gradients, random)
    name, numbers, place = _choose(gradients, random)
    before = numbers[place].item()
    numbers[place] = nan
    return f"number {place} of the gradient of {name} is nan instead of {before:.6g}"


def _poison_loss(loss: Tensor) -> str:
    before = loss.detach().item()
    loss.detach().fill_(nan)
    loss.register_hook(lambda gradient: gradient * nan)  # type: ignore[no-untyped-call]
    return f"the loss is nan instead of {before:.6g}"


def _flip(title: str, tensors: Mapping[str, Tensor], random: Random) -> str:
    name, numbers, place = _choose(tensors, random)
    size = numbers.element_size()
    bit = random.randrange(8 * size)
    before = numbers[place].item()
    word = numbers[place].view(WORDS[size])
    word ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit  # the highest bit is the sign of a word
    after = numbers[place].item()
    return f"bit {bit} of number {place} of the {title} of {name} is flipped: {after!r} instead of {before!r}"


def _choose(tensors: Mapping[str, Any], random: Random) -> tuple[str, Tensor, int]:
    if not tensors:
        raise ValueError("No parameter has a gradient at this event.")
    name = random.choice(sorted(tensors))
    tensor = tensors[name].detach()
    numbers = getattr(tensor, "to_local", lambda: tensor)().view(-1)
    return name, numbers, random.randrange(numbers.numel())
