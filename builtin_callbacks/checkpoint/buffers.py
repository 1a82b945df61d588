"""Kept host memory that a state is copied into, so that it can be written while training continues."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

T = TypeVar("T")
_Place = tuple[torch.device, int, int]


class Size(NamedTuple):
    """What makes one buffer as good as another."""

    bytes: int
    pinned: bool


class Buffers:
    """Host memory that is kept from save to save: fresh memory costs a page fault per page, many times the copy.

    A copy is good until the next one, which overwrites it. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._kept: dict[Size, list[UntypedStorage]] = {}

    def reserve(self, needed: Mapping[Size, int]) -> None:
        """Have at least so many buffers of each size, touched, so that the next copy finds them ready.

        Args:
            needed: how many of which size, as `sizes_of` returns for a state.
        """
        for size, count in needed.items():
            kept = self._kept.setdefault(size, [])
            kept.extend(_new_buffer(size) for _ in range(count - len(kept)))

    @torch.no_grad()
    def copy(self, state: T) -> T:
        """Return the state as it is now: nested values rebuilt, tensors copied into the kept buffers.

        Tensors that share memory share it in the copy too, and are copied once. What is on a GPU comes to pinned host
        memory; it is waited for, once. Buffers that this state has no use for are let go of.

        Args:
            state: dicts, lists and tuples of plain values and tensors.
        """
        copied: dict[_Place, UntypedStorage] = {}
        taken: Counter[Size] = Counter()

        def copy_tensor(tensor: Tensor) -> Tensor:
            source = tensor.untyped_storage()
            place = _place(source)
            if place in copied:
                return _like(tensor, copied[place])
            copied[place] = buffer = self._take(_size(source), taken)
            view, on_gpu = _like(tensor, buffer), source.device.type == "cuda"
            if tensor.is_contiguous() and tensor.nbytes == source.nbytes():
                view.copy_(tensor, non_blocking=on_gpu)  # not by bytes: torch calls in threads by their number
            else:
                buffer.copy_(source, non_blocking=on_gpu)
            return view

        copy: T = _rebuilt(state, copy_tensor)
        for device in {device for device, *_ in copied if device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        self._kept = {size: self._kept[size][:count] for size, count in taken.items()}
        return copy

    def _take(self, size: Size, taken: Counter[Size]) -> UntypedStorage:
        kept, used = self._kept.setdefault(size, []), taken[size]
        if used == len(kept):
            kept.append(_new_buffer(size))
        taken[size] = used + 1
        return kept[used]


def sizes_of(state: Any) -> Counter[Size]:
    """Return how many buffers of which size a copy of a state takes; holds on to nothing of the state."""
    storages = [tensor.untyped_storage() for tensor in _tensors_of(state)]
    return Counter(_size(storage) for storage in {_place(storage): storage for storage in storages}.values())


def _new_buffer(size: Size) -> UntypedStorage:
    # Filled, because memory that was never written to is only promised.
    return torch.empty(size.bytes, dtype=torch.uint8, pin_memory=size.pinned).fill_(0).untyped_storage()


def _size(storage: UntypedStorage) -> Size:
    return Size(storage.nbytes(), storage.device.type == "cuda")


def _place(storage: UntypedStorage) -> _Place:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _like(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return a storage as this tensor views its own."""
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is nn.Parameter:
        return nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _has_storage(value: Any) -> bool:
    """Return whether a value is a tensor that is a plain view of its memory; sparse and such are none."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg() or value.is_quantized or value.is_meta or value.is_nested)
    )


def _rebuilt(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _rebuilt(item, copy_tensor) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)([_rebuilt(item, copy_tensor) for item in value])
    if _has_storage(value):
        return copy_tensor(value)
    if type(value) in (Tensor, nn.Parameter):  # sparse and such, of which deepcopy knows some only
        return value.detach().clone()
    return deepcopy(value.detach() if isinstance(value, Tensor) else value)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if type(value) in (dict, OrderedDict, Counter):
        value = list(value.values())
    if type(value) in (list, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif _has_storage(value):
        yield value
