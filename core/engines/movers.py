"""Batches on their way to a device: whatever they are made of."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")
Move = Callable[[Any], Any]
PLAIN = (Tensor, tuple, list, dict)


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device; without a wait where they come from pinned memory.

    Looks into lists, tuples (named ones too), mappings, dataclasses and packed sequences; what has a method
    `to(device)` is asked to move itself; `register_mover` teaches other types. Anything else stays as it is.
    """
    kind = type(batch)
    if kind is Tensor:
        # Towards the CPU, torch would hand out a tensor that is not filled yet.
        return batch.to(device, non_blocking=device.type != "cpu")
    if kind is tuple or kind is list:
        return kind([move(each, device) for each in batch])
    if kind is dict:
        return {key: move(each, device) for key, each in batch.items()}
    mover = _movers.dispatch(kind)
    if mover is not _unregistered:
        return mover(batch, lambda part: move(part, device))
    return _move_other(batch, device)


def register_mover(kind: type[T], function: Callable[[T, Move], Any]) -> None:
    """Register how batches of a type, and of its subclasses, move to a device.

    Args:
        kind: the type; neither a tensor nor a plain list, tuple or dict.
        function: called with (value, move); returns a new value, with `move(part)` for each of its parts.

    Raises:
        TypeError: the type is none, or the function cannot be called.
        ValueError: the type is one of those that are always moved in the same way.
    """
    if not isinstance(kind, type) or not callable(function):
        raise TypeError(f"register_mover takes a class and a function of (value, move), got {kind!r}, {function!r}.")
    if kind in (*PLAIN, object):
        raise ValueError(f"{kind.__name__} is always moved in the same way: register a class of your own.")
    _movers.register(kind, function)


@singledispatch
def _movers(batch: Any, move: Move) -> Any:
    """Hold what is registered; whatever is not, has no mover."""


_unregistered = _movers.dispatch(object)


@_movers.register
def _move_packed(batch: PackedSequence, move: Move) -> PackedSequence:
    return PackedSequence(  # the lengths belong on the CPU
        move(batch.data), batch.batch_sizes, move(batch.sorted_indices), move(batch.unsorted_indices)
    )


def _move_other(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(move(each, device) for each in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(move(each, device) for each in batch)
    if isinstance(batch, dict | UserDict):
        return _replace(batch, batch.items(), device, type(batch).__setitem__)
    if isinstance(batch, Mapping):
        make: Callable[[dict[Any, Any]], Any] = type(batch)
        return make({key: move(each, device) for key, each in batch.items()})
    if is_dataclass(batch) and not isinstance(batch, type):
        named = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
        return _replace(batch, named, device, object.__setattr__)
    return batch


def _replace(
    batch: Any, parts: Iterable[tuple[Any, Any]], device: torch.device, put: Callable[[Any, Any, Any], None]
) -> Any:
    """Return a copy with its parts moved: what else it knows stays, such as the default of a defaultdict."""
    moved = copy(batch)
    for name, part in parts:
        put(moved, name, move(part, device))
    return moved
