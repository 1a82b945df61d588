"""The bytes of tensors and arrays, kept aside and put back into the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LARGE = 2**20  # bytes of a tensor of the data, above which it is watched and not copied


class KeptTensors:
    """Tensors, with copies of their memory on the CPU.

    Attributes:
        changed: what was written to, and was not copied, in words; known when the rest is put back.
    """

    def __init__(self) -> None:
        self.changed: list[str] = []
        self._tensors: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []
        self._memory: dict[tuple[str, int], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._watched: list[tuple[Tensor, int]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def keep(self, tensor: Tensor, *, is_data: bool) -> Iterator[Any]:
        """Keep a tensor; yield what else belongs to it.

        Args:
            tensor: of any kind; the parts of a sharded one are kept, and of one without memory nothing is.
            is_data: whether it belongs to a dataset: a large one is not copied then.
        """
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from (getattr(tensor, name) for name in names)
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
            self._keep_memory(tensor, is_data=is_data)
        if tensor.is_leaf:
            self._tensors.append((tensor, tensor.data, tensor.grad, tensor.requires_grad))
            yield tensor.grad

    def keep_array(self, array: np.ndarray[Any, Any], *, is_data: bool) -> None:
        """Keep an array; not a large one of the data, nor what lies on a disk."""
        if isinstance(array, np.memmap) or not array.flags.writeable or (is_data and array.nbytes > LARGE):
            return
        self._arrays.append((array, array.copy()))

    def restore(self) -> None:
        """Put everything back, in place."""
        for tensor, data, grad, requires_grad in self._tensors:
            if not _is_same_memory(tensor.data, data):
                tensor.data = data
            if tensor.grad is not grad:
                tensor.grad = grad
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
        for storage, copied in self._memory.values():
            if storage.nbytes() != copied.nbytes():
                storage.resize_(copied.nbytes())
            storage.copy_(copied)
        for array, before in self._arrays:
            array[...] = before
        for tensor, version in self._watched:
            if tensor._version != version:
                self.changed.append(f"a tensor of the data, {list(tensor.shape)}, was written to while it was read")

    def _keep_memory(self, tensor: Tensor, *, is_data: bool) -> None:
        storage = tensor.untyped_storage()
        if is_data and storage.nbytes() > LARGE:
            self._watched.append((tensor, tensor._version))
            return
        place = str(tensor.device), storage.data_ptr()
        if place[1] and place not in self._memory:
            copied = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._memory[place] = storage, copied.copy_(storage)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    if is_traceable_wrapper_subclass(one) or is_traceable_wrapper_subclass(other):
        return one is other
    same_kind = (one.dtype, one.device, one.shape, one.stride()) == (
        other.dtype,
        other.device,
        other.shape,
        other.stride(),
    )
    return same_kind and one.data_ptr() == other.data_ptr()
