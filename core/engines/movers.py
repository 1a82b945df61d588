"""Moving batches of any type to a device."""

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
LARGE = 1 << 20  # bytes; copying less is faster than using another stream


def move(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, without waiting if they come from pinned memory.

    Large tensors are copied to a GPU while it still computes with the previous batch. Lists, tuples (also named ones),
    mappings, dataclasses and packed sequences are moved part by part. An object with a method `to(device)` moves
    itself; `register_mover` adds other types. Anything else stays as it is.
    """
    kind = type(batch)
    if kind is Tensor:
        return _move_tensor(batch, device)
    if kind is tuple or kind is list:
        return kind([move(item, device) for item in batch])
    if kind is dict:
        return {key: move(value, device) for key, value in batch.items()}
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
        TypeError: `kind` is not a class.
        ValueError: the type is one of those whose move cannot be changed.
    """
    if kind in (*PLAIN, object):
        raise ValueError(f"{kind.__name__} has a fixed way to move: register a class of your own.")
    _movers.register(kind, function)


@singledispatch
def _movers(batch: Any, move: Move) -> Any:
    """Registry of `register_mover`; the default is a type without a mover."""


_unregistered = _movers.dispatch(object)


@_movers.register
def _move_packed(batch: PackedSequence, move: Move) -> PackedSequence:
    return PackedSequence(  # the lengths belong on the CPU
        move(batch.data), batch.batch_sizes, move(batch.sorted_indices), move(batch.unsorted_indices)
    )


class CopyStream:
    """A GPU stream for copies from the host that run during the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotation here

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the GPU; later computation waits for it on the device, the host does not wait."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        moved.record_stream(computing)  # else the next copy may get its memory too early
        return moved


@cache
def copy_stream(index: int) -> CopyStream:
    # One stream per GPU, because memory freed on a stream is reused on that stream only.
    return CopyStream(torch.device("cuda", index))


def uses_copy_stream(tensor: Tensor, device: torch.device) -> bool:
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.nbytes >= LARGE


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    if uses_copy_stream(tensor, device):
        return copy_stream(torch.cuda.current_device() if device.index is None else device.index).copy(tensor)
    # A non-blocking copy to the CPU would return a tensor that is not filled yet.
    return tensor.to(device, non_blocking=device.type != "cpu")


def _move_other(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(move(item, device) for item in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(move(item, device) for item in batch)
    if isinstance(batch, dict | UserDict):
        return _replace(batch, batch.items(), device, type(batch).__setitem__)
    if isinstance(batch, Mapping):
        make: Callable[[dict[Any, Any]], Any] = type(batch)
        return make({key: move(value, device) for key, value in batch.items()})
    if is_dataclass(batch) and not isinstance(batch, type):
        named = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
        return _replace(batch, named, device, object.__setattr__)
    return batch


def _replace(
    batch: Any, parts: Iterable[tuple[Any, Any]], device: torch.device, put: Callable[[Any, Any, Any], None]
) -> Any:
    # Attributes that are not parts are kept, such as the default of a defaultdict.
    moved = copy(batch)
    for name, part in parts:
        put(moved, name, move(part, device))
    return moved
