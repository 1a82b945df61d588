"""How much room a state takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
