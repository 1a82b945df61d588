"""Batches on their way to a device: whatever they are made of."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, singledispatch
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")
Move = Callable[[Any], Any]
PLAIN = (Tensor, tuple, list, dict)
LARGE = 1 << 20  # bytes; less is copied in a shorter time than it takes the host to use another stream


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device; without a wait where they come from pinned memory.

    What is large goes to a GPU while that still computes with the batch before.
    Looks into lists, tuples (named ones too), mappings, dataclasses and packed sequences; what has a method
    `to(device)` is asked to move itself; `register_mover` teaches other types. Anything else stays as it is.
    """
    kind = type(batch)
    if kind is Tensor:
        return _move_tensor(batch, device)
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


class CopyStream:
    """A stream of a GPU for copies from the host, which need not wait there for the computation.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotation here

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the GPU; what is computed from here on waits for it there, and the host does not."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        moved.record_stream(computing)  # else the next copy may get its memory while it is still computed with
        return moved


@cache
def copy_stream(index: int) -> CopyStream:
    """Return the stream for copies to a GPU: always the same, as memory that was freed on one is used on no other."""
    return CopyStream(torch.device("cuda", index))


def is_copied_aside(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor goes to a device beside its computation: from the host to a GPU, where it is large."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.nbytes >= LARGE


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    if is_copied_aside(tensor, device):
        return copy_stream(torch.cuda.current_device() if device.index is None else device.index).copy(tensor)
    # Towards the CPU, torch would hand out a tensor that is not filled yet.
    return tensor.to(device, non_blocking=device.type != "cpu")


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
