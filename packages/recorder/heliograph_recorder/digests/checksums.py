"""Checksums of tensors and batches, computed on the device of each tensor without waiting for it.

The words of a tensor are multiplied by fixed odd factors and added modulo 2**64. A single different word always changes
the sum, and the sum does not depend on the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

LIMIT = 2**64
Sum: TypeAlias = int | Tensor  # from 0 to 2**64 for CPU tensors, else a tensor of one int64
WIDTH = 2**14  # words that are multiplied at once, on the CPU
AT_ONCE = 2**22  # likewise on a device, with few slow calls; the products take 8 bytes each
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
LARGE = 2**14  # bytes of a tensor that is added word by word; a CRC-32 is faster for smaller ones
_FACTORS = np.random.default_rng(20261126).integers(-(2**63), 2**63, WIDTH) | 1  # odd: each has an inverse
_FACTORS_ON: dict[torch.device, Tensor] = {}
_ARRAYS = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
)
_SIMPLE = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8))


def checksum(tensors: Iterable[Tensor]) -> Sum:
    sums: list[Sum] = []
    on_devices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in (part.detach() for tensor in tensors for part in strided(tensor)):
        if part.is_cpu:
            sums.append(checksum_of(part))
        else:
            words = _words(part)
            on_devices.setdefault((words.device, words.dtype), []).append(words)
    return combine([*sums, *map(_checksum_of_vectors, on_devices.values())])


def _checksum_of_vectors(vectors: Sequence[Tensor]) -> Tensor:
    """Return one checksum of vectors on a device, with few operators and little extra memory."""
    pieces = (piece for vector in vectors for piece in torch.split(vector, AT_ONCE))
    sums = [(block * _factors_on(block.device, len(block))).sum() for block in _joined(pieces)]
    return sums[0] if len(sums) == 1 else _checksum_of_vectors([torch.stack(sums)])


def _joined(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Concatenate consecutive pieces to blocks of at most `AT_ONCE` words; a large piece is not copied."""
    block: list[Tensor] = []
    words = 0
    for piece in pieces:
        if block and words + len(piece) > AT_ONCE:
            yield block[0] if len(block) == 1 else torch.cat(block)
            block, words = [], 0
        block.append(piece)
        words += len(piece)
    yield block[0] if len(block) == 1 else torch.cat(block)


def checksum_of(tensor: Tensor) -> Sum:
    words = _words(tensor.detach())
    if not words.is_cpu:
        return _checksum_of_vectors([words])
    numbers = words.numpy()
    blocks = (numbers[at : at + WIDTH] for at in range(0, len(numbers), WIDTH))
    return sum(int(block @ _FACTORS[: len(block)]) * factor(number) for number, block in enumerate(blocks)) % LIMIT


def combine(parts: Iterable[Sum]) -> Sum:
    number, on_device = 0, None
    for place, part in enumerate(parts):
        if not isinstance(part, Tensor):
            number = (number + part * factor(place)) % LIMIT
        elif on_device is None:
            on_device = part * factor(place)
        else:
            on_device = on_device + (part * factor(place)).to(on_device.device, non_blocking=True)
    return number if on_device is None else on_device + (number - LIMIT if number >= LIMIT // 2 else number)


def text_checksum(text: str) -> int:
    return crc32(text.encode(errors="surrogatepass"))


def factor(number: int) -> int:
    return int(_FACTORS[number % WIDTH])


def _factors_on(device: torch.device, count: int) -> Tensor:
    """Return the factors of `count` words: the factor in the block times the factor of the block."""
    factors = _FACTORS_ON.get(device)
    if factors is None or len(factors) < count:
        blocks = 2 ** max(0, (count - 1) // WIDTH).bit_length()
        of_blocks = np.array([1, *_FACTORS[1:blocks]])
        products = torch.from_numpy((of_blocks[:, None] * _FACTORS).reshape(-1))
        factors = _FACTORS_ON[device] = products.to(device, non_blocking=True)
    return factors[:count]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a strided tensor as a vector of the widest words that its alignment allows."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.reshape(-1).contiguous()
    size, offset = flat.nbytes, flat.storage_offset() * flat.element_size()
    return flat.view(next(word for word in WORDS if size % word.itemsize == 0 and offset % word.itemsize == 0))


def strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided parts of a tensor: itself, its local shard, or the parts of a sparse or nested one."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if local.is_quantized:
        yield local.int_repr()
    elif local.layout is torch.strided and not local.is_nested:
        yield local
    elif local.is_nested:
        yield from local.unbind()
    else:
        yield local.to_dense()


def read_batch(batch: Any) -> list[Sum]:
    """Return checksums of a batch to combine, without waiting for a device; the first one is not 0.

    The batch is nested containers and objects with attributes.
    """
    crc, sums = 0, list[Sum]()
    for leaf in _leaves(batch, ()):
        if isinstance(leaf, int):
            crc = crc32(leaf.to_bytes(4, "little"), crc)
        elif leaf.is_cpu and leaf.dtype in _SIMPLE and leaf.nbytes < LARGE:
            array: Any = leaf.detach().contiguous().numpy()
            crc = crc32(array, crc32(f"{array.dtype.char}{array.shape}".encode(), crc))
        else:
            crc = crc32(f"{leaf.dtype}{tuple(leaf.shape)}".encode(), crc)
            sums.append(checksum_of(leaf))
    return [(crc or 1) << 32, *sums]


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[Tensor | int]:
    """Yield the tensors of a nested value, and the checksums of other leaves; a cycle is cut."""
    if isinstance(value, Tensor):
        yield from strided(value)
    elif isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS and value.dtype.isnative:
        array = np.ascontiguousarray(value)
        yield torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns of read-only arrays
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield crc32(value.tobytes(), text_checksum(f"{value.dtype}{value.shape}"))
    elif isinstance(value, SCALARS):
        yield text_checksum(repr(value))
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
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [type(value).__qualname__, {**attributes, **getattr(value, "__dict__", {})}]
