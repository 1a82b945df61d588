"""Checksums of nested values, computed on the device of each tensor without waiting for it.

Small content on the CPU has a CRC-32. The words of other tensors are multiplied by odd factors and added modulo 2**64.
A single different word always changes the sum, and the sum does not depend on the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

Part: TypeAlias = int | Tensor  # of 64 bits; on a device a tensor of one int64
AT_ONCE = 2**22  # words that are multiplied at once; the products take 8 bytes each
LARGE = 2**16  # bytes of a tensor on the CPU; a CRC-32 is faster for smaller ones
OF_NUMPY = (torch.float32, torch.int64, torch.float16, torch.float64, torch.int32, torch.uint8)  # saves `words_of`
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
ODD = 0x1B873593CC9E2D51  # any large odd number
SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def checksum(value: Any) -> list[Part]:
    """Return a checksum in parts: of everything on the CPU, and of the tensors on a device by dtype.

    The value is nested containers and objects with attributes.
    """
    crc = 0
    on_devices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for leaf in _leaves(value, ()):
        if isinstance(leaf, str):
            crc = crc32(leaf.encode(errors="surrogatepass"), crc)
            continue
        crc = crc32(f"{leaf.dtype}{leaf.shape}".encode(), crc)
        if not leaf.is_cpu:
            words = words_of(leaf)
            on_devices.setdefault((words.device, words.dtype), []).append(words)
        elif leaf.nbytes < LARGE:
            content = leaf.detach().contiguous() if leaf.dtype in OF_NUMPY else words_of(leaf)
            crc = crc32(content.numpy().data, crc)
        else:
            crc = crc32(int(_sum([words_of(leaf)])).to_bytes(8, "little", signed=True), crc)
    return [crc, *map(_sum, on_devices.values())]


def words_of(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a vector of the widest words that its alignment allows."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    size, offset = flat.nbytes, flat.storage_offset() * flat.element_size()
    return flat.view(next(word for word in WORDS if size % word.itemsize == 0 and offset % word.itemsize == 0))


def dense(tensor: Any) -> Tensor:
    """Return a tensor of the same content with strides: the local shard of a sharded one."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local if local.layout is torch.strided else local.to_dense()


def _sum(vectors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of vectors on a device, with few operators and little extra memory."""
    if sum(map(len, vectors)) > AT_ONCE:
        parts = vectors if len(vectors) > 1 else torch.split(vectors[0], AT_ONCE)
        half = len(parts) // 2
        return _sum([torch.stack([_sum(parts[:half]), _sum(parts[half:])])])
    block = vectors[0] if len(vectors) == 1 else torch.cat([*vectors])
    return (block * _factors(block.device, len(block).bit_length())[: len(block)]).sum()


@cache
def _factors(device: torch.device, bits: int) -> Tensor:
    numbers = torch.arange(1, 2**bits + 1, device=device) * ODD
    return (numbers ^ (numbers >> 29)) * ODD | 1  # without a pattern: two swapped words change the sum


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[Tensor | str]:
    """Yield the tensors of a nested value, and texts of its other leaves; a cycle is cut."""
    if isinstance(value, Tensor):
        yield dense(value)
    elif isinstance(value, SCALARS):
        yield repr(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape}"
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        yield torch.from_numpy(content if content.flags.writeable else content.copy())  # torch warns of read-only ones
    elif id(value) not in above:
        for part in _parts(value):
            yield from _leaves(part, (*above, id(value)))


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a container or an object, including keys and attribute names."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, np.ndarray):  # with dtype object
        return [value.shape, *value.flat]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return [type(value).__qualname__, object.__getstate__(value)]
