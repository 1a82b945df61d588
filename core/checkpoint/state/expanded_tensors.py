"""Tensors that show one value in many places, as `expand` makes them: torch writes into none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def loadable(module: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Give the expanded tensors of a module their values; return a saved state as its `load_state_dict` takes it then.

    Raises:
        ValueError: one was saved with different values in the places that show one.
    """
    state = dict(saved)
    for name, own in _tensors(module):
        if is_spread(own) and isinstance(saved.get(name), Tensor):
            _fill(own.detach(), saved[name], name)
            state[name] = own  # which torch copies nothing into
    return state


def is_spread(tensor: Tensor) -> bool:
    """Return whether a tensor shows one value in many places."""
    return tensor.layout is torch.strided and any(_dimensions(tensor))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _dimensions(tensor: Tensor) -> list[bool]:
    return [stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]


def _fill(own: Tensor, saved: Tensor, name: str) -> None:
    value, shown = saved, own
    for dimension, is_one in enumerate(_dimensions(own)):
        if is_one:
            value, shown = value.narrow(dimension, 0, 1), shown.narrow(dimension, 0, 1)
    if not _is_same(value.expand_as(saved), saved):
        raise ValueError(
            f"{name} is an expanded tensor, which shows one value in many places; the checkpoint holds different "
            f"values there: clone() it in your program."
        )
    with torch.no_grad():
        shown.copy_(value)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether values are equal; NaN is."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
