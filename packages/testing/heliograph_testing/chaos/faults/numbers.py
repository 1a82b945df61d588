"""Faults in numbers: a loss or a gradient that is NaN, a bit of a gradient or a weight that is another one."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heliograph import Run

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def change(kind: str, run: Run, random: Random) -> str:
    """Change a number of a run; return which, and from what to what.

    Args:
        kind: `nan-loss`, `nan-gradient`, `bit-in-gradient` or `bit-in-weight`.
        run: the run.
        random: chooses the parameter, the number in it, and the bit.
    """
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
    gradients = {name: each.grad for name, each in weights.items() if each.grad is not None}
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


def _flip(what: str, tensors: Mapping[str, Tensor], random: Random) -> str:
    name, numbers, place = _choose(tensors, random)
    size = numbers.element_size()
    bit = random.randrange(8 * size)
    before = numbers[place].item()
    word = numbers[place].view(WORDS[size])
    word ^= -(1 << bit) if bit == 8 * size - 1 else 1 << bit  # the highest bit is the sign of a word
    return f"bit {bit} of number {place} of the {what} of {name} is another one: {numbers[place].item()!r}, {before!r}"


def _choose(tensors: Mapping[str, Any], random: Random) -> tuple[str, Tensor, int]:
    """Return the name of a tensor, its numbers in a row, and the place of one of them.

    Raises:
        ValueError: there is no tensor.
    """
    if not tensors:
        raise ValueError("A fault in a gradient needs one: no parameter has a gradient at this event.")
    name = random.choice(sorted(tensors))
    tensor = tensors[name].detach()
    numbers = getattr(tensor, "to_local", lambda: tensor)().view(-1)
    return name, numbers, random.randrange(numbers.numel())
