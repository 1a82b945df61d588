"""Faults in numbers, and the answers of plugins to them."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heliograph import Run

SOON = 2  # batches after a fault in which a request counts as an answer
ANSWERS = frozenset({"stop", "skip_step", "skip_batch", "roll_back"})  # requests that answer bad numbers
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Baseline:
    """The numbers of requests, warnings and batches of a run when a number was changed."""

    def __init__(self, run: Run) -> None:
        self._requests = run.control.history.total
        self._warnings = len(run.report.warnings)
        self._batches = run.progress.batches

    def answer(self, run: Run) -> tuple[str, str] | None:
        # A request soon after the fault, or a warning.
        history, warnings = run.control.history, run.report.warnings
        new = list(history)[len(history) - (history.total - self._requests) :]
        for request in new if run.progress.batches - self._batches <= SOON else ():
            if request.verb in ANSWERS:
                return request.by, f"{request.verb}: {request.reason}"
        return ("a warning", warnings[self._warnings]) if len(warnings) > self._warnings else None


def change(kind: str, run: Run, random: Random) -> str:
    """Change a number of a run, chosen by `random`, and return a description of the change."""
    if kind == "nan-loss":
        before = run.loss.detach().item()
        run.loss.detach().fill_(nan)
        run.loss.register_hook(lambda gradient: gradient * nan)
        return f"the loss is nan instead of {before:.6g}"
    tensors: dict[str, Any] = {
        f"{module}.{name}": parameter
        for module, owner in run.modules.items()
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }
    if kind == "bit-in-weight":
        return _flip("weight", tensors, random)
    gradients = {name: weight.grad for name, weight in tensors.items() if weight.grad is not None}
    if kind == "bit-in-gradient":
        return _flip("gradient", gradients, random)
    name, numbers, place = _choose(gradients, random)
    before = numbers[place].item()
    numbers[place] = nan
    return f"number {place} of the gradient of {name} is nan instead of {before:.6g}"


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
