"""A state whose tensors have no larger storage than they need, and how many bytes it needs on disk."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ....events.checks import PLAIN
from .schema import MAPPINGS, SEQUENCES

View = tuple[Any, ...]
SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer
PER_TENSOR = 512  # a record's header, its padding, its entry in the directory
PER_VALUE = 16
TEXTS = frozenset({str, bytes})
NUMBERS = PLAIN - TEXTS


def compacted(state: Any) -> tuple[Any, int]:
    """Return a state whose tensors have no larger storage than they need, and about how many bytes it needs on disk.

    A tensor is copied if its storage is larger than all views of it in the state, as of a slice, or if tensors of
    another dtype view the same memory, which torch cannot save. All others are returned as they are and still share
    memory; so do copies of the same slice.
    """
    tensors, rest = _contents(state)
    if loose := _loose(tensors):
        state = _rebuilt(state, loose, {})
        tensors, rest = _contents(state)
    return state, SLACK + rest + PER_TENSOR * len(tensors) + _bytes(tensors)


def _contents(state: Any) -> tuple[list[Tensor], int]:
    """Return the tensors of a state, and about how many bytes the rest needs."""
    tensors, size, level = list[Tensor](), 0, [state]
    while level:
        keys, items = list[Any](), list[Any]()
        for each in level:
            if type(each) in MAPPINGS:
                keys += each
                items += each.values()
            elif type(each) in SEQUENCES:
                size += PER_VALUE * len(each)
                items += [item for item in each if type(item) not in NUMBERS]  # lists of a thousand are common
            elif isinstance(each, Tensor):
                tensors.append(each)
        size += PER_VALUE * len(keys) + sum([len(each) for each in chain(keys, items) if type(each) in TEXTS])
        level = [item for item in items if type(item) not in PLAIN]
    return tensors, size


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors; a storage is saved once, as a whole."""
    storages, size = dict[int, int](), 0
    for each in tensors:
        if each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            size += each.element_size() * each.numel()
    return size + sum(storages.values())


def _loose(tensors: list[Tensor]) -> set[int]:
    """Return the storages that are larger than what is shown of them, or shown as several dtypes."""
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: two storages may have the same memory, as of NumPy's arrays
    addresses: dict[int, int] = {}
    for tensor in filter(_has_memory, tensors):
        storage = tensor.untyped_storage()
        number, address = storage._cdata, storage.data_ptr()
        sizes[number], addresses[number] = storage.nbytes(), address
        dtypes.setdefault(address, set()).add(tensor.dtype)
        views.setdefault(number, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    return loose | {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}


def _rebuilt(value: Any, loose: set[int], made: dict[View, Tensor]) -> Any:
    if type(value) in MAPPINGS:
        return type(value)({key: _rebuilt(item, loose, made) for key, item in value.items()})
    if type(value) in SEQUENCES:
        return type(value)([_rebuilt(item, loose, made) for item in value])
    if not _has_memory(value) or value.untyped_storage()._cdata not in loose:
        return value
    view = (value.untyped_storage()._cdata, *_view(value))
    if view not in made:
        made[view] = value.detach().clone(memory_format=torch.contiguous_format)
    form = (*view, type(value), value.requires_grad)  # a frozen view of a trained tensor is a tensor of its own
    if form not in made:
        copy = made[view].detach()
        copy = nn.Parameter(copy, requires_grad=False) if type(value) is nn.Parameter else copy
        made[form] = copy.requires_grad_(value.requires_grad)
    return made[form]


def _has_memory(value: Any) -> bool:
    """Return whether a value is a dense tensor with a storage: not sparse, quantized, meta or nested."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
