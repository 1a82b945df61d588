"""What a state takes on the disk: a tensor brings all memory that it is a view of, needed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..state.plain import MAPPINGS, SEQUENCES

View = tuple[Any, ...]


def compact(state: Any) -> Any:
    """Return a state whose tensors take no more than they show.

    A tensor is copied where its memory is larger than all that tensors of the state show of it, as of a slice, and
    where tensors of another dtype show the same memory, which torch does not save. All others stay the very tensors,
    and continue to share memory; so do copies of what is the same slice.
    """
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: two storages may have the same memory, as of NumPy's arrays
    addresses: dict[int, int] = {}
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage._cdata], addresses[storage._cdata] = storage.nbytes(), storage.data_ptr()
        dtypes.setdefault(storage.data_ptr(), set()).add(tensor.dtype)
        views.setdefault(storage._cdata, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    loose |= {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}
    return _rebuilt(state, loose, {}) if loose else state


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
    form = (*view, type(value), value.requires_grad)  # a frozen view of what another one trains is one of its own
    if form not in made:
        copy = made[view].detach()
        copy = nn.Parameter(copy, requires_grad=False) if type(value) is nn.Parameter else copy
        made[form] = copy.requires_grad_(value.requires_grad)
    return made[form]


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in MAPPINGS:
        value = list(value.values())
    if type(value) in SEQUENCES:
        for item in value:
            yield from _tensors(item)
    elif _has_memory(value):
        yield value


def _has_memory(value: Any) -> bool:
    """Return whether a value is a tensor that is a plain view of its memory; sparse and such are none."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer


PER_TENSOR = 512  # a record's header, its padding, its entry in the directory


PER_VALUE = 16


def estimate(state: Any) -> int:
    """Return about how many bytes a state takes on the disk; memory that tensors share counts once."""
    storages: dict[int, int] = {}
    return SLACK + _values(state, storages) + sum(storages.values())


def _values(value: Any, storages: dict[int, int]) -> int:
    if isinstance(value, Tensor):
        return PER_TENSOR + _tensor(value, storages)
    if isinstance(value, Mapping):
        return sum(_values(key, storages) + _values(item, storages) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_values(item, storages) for item in value)
    return PER_VALUE + (len(value) if isinstance(value, str | bytes) else 0)


def _tensor(tensor: Tensor, storages: dict[int, int]) -> int:
    """Return what a tensor takes by itself; one with a storage enters that instead, for it is saved whole, and once."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    storage = tensor.untyped_storage()
    storages[storage._cdata] = storage.nbytes()
    return 0
