"""Checksums of tensors and batches, computed on the device of each tensor without waiting for it.

The words of a tensor are multiplied by fixed odd factors and added modulo 2**64. A single different word always changes
the sum, and the sum does not depend on the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import adler32, crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LIMIT = 2**64
Numbers: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = Numbers | Tensor  # a number for each row of a tensor, on its device
Sum: TypeAlias = int | Tensor  # from 0 to 2**64 for CPU tensors, else a tensor of one int64
# Of a batch: a checksum, a sum over its small samples, and the checksums of the rows of large tensors.
BatchSums: TypeAlias = tuple[int, int, Sequence[Rows]]
WIDTH = 2**14  # words that are multiplied at once, on the CPU
AT_ONCE = 2**22  # likewise on a device, with few slow calls; the products take 8 bytes each
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
SMALL = 65521  # the modulus of Adler-32
LARGE = 1024  # bytes of a sample that is added word by word; this is not slower for smaller ones
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
            sums.append(fold(_row_sums_on_cpu(_words(part).numpy())))
        else:
            vector = _words(part.reshape(1, -1))[0]
            on_devices.setdefault((vector.device, vector.dtype), []).append(vector)
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


def row_sums(tensor: Tensor) -> Rows:
    """Return a checksum for each row of a tensor, of shape (rows,); a scalar has one row."""
    words = _words(tensor.detach())
    return _row_sums_on_cpu(words.numpy()) if words.is_cpu else _row_sums_on_device(words)


def _row_sums_on_cpu(words: NDArray[Any]) -> Numbers:
    total = np.zeros(len(words), np.int64)
    for number, at in enumerate(range(0, words.shape[1], WIDTH)):
        block = words[:, at : at + WIDTH]
        sums = block @ _FACTORS[: block.shape[1]]
        total = total + sums * _factor(number) if number else sums
    return total


def _row_sums_on_device(words: Tensor) -> Tensor:
    """Return the same as `_row_sums_on_cpu` for rows of at most `AT_ONCE` words."""
    factors = _factors_on(words.device, min(words.shape[1], AT_ONCE))
    if words.numel() <= AT_ONCE:
        return (words * factors).sum(1)
    height = max(1, AT_ONCE // len(factors))
    blocks = [
        torch.cat([(part * factors[: part.shape[1]]).sum(1) for part in torch.split(block, height)])
        for block in torch.split(words, AT_ONCE, 1)
    ]
    total = blocks[0]
    for number, block in enumerate(blocks[1:], 1):
        total = total + block * _factor(number)
    return total


def fold(numbers: Numbers) -> int:
    if len(numbers) <= WIDTH:
        return int(numbers @ _FACTORS[: len(numbers)]) % LIMIT
    parts = [fold(numbers[at : at + WIDTH]) for at in range(0, len(numbers), WIDTH)]
    return sum(part * _factor(place) for place, part in enumerate(parts)) % LIMIT


def combine(parts: Iterable[Sum]) -> Sum:
    number, on_device = 0, None
    for place, part in enumerate(parts):
        if not isinstance(part, Tensor):
            number = (number + part * _factor(place)) % LIMIT
        elif on_device is None:
            on_device = part * _factor(place)
        else:
            on_device = on_device + (part * _factor(place)).to(on_device.device, non_blocking=True)
    return number if on_device is None else on_device + (number - LIMIT if number >= LIMIT // 2 else number)


def text_checksum(text: str) -> int:
    return crc32(text.encode(errors="surrogatepass"))


def _factor(number: int) -> int:
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
    """Return the bits of a strided tensor, of shape (rows, words), in the widest words that its alignment allows."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    rows = real.shape[0] if real.dim() else 1
    if not real.numel():
        return real.new_empty(rows, 0, dtype=torch.int64)
    flat = real.reshape(rows, -1).contiguous()
    size, offset = flat.element_size(), flat.storage_offset() * flat.element_size()
    length = flat.shape[1] * size
    return flat.view(next(word for word in WORDS if length % word.itemsize == 0 and offset % word.itemsize == 0))


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


def read_batch(batch: Any) -> BatchSums:
    """Read a batch without waiting for a device; `checksums_of` computes the digests later.

    The batch is nested containers and objects with attributes. The checksum is never 0, which means not read.
    """
    crc, small = 0, 0
    rows: list[Rows] = []
    for leaf in _leaves(batch, ()):
        if isinstance(leaf, int):
            crc = crc32(leaf.to_bytes(4, "little"), crc)
        elif leaf.is_cpu and leaf.dtype in _SIMPLE and _is_small(leaf):
            array: Any = leaf.detach().contiguous().numpy()
            crc = crc32(array, crc32(f"{array.dtype.char}{array.shape}".encode(), crc))
            small += adler32(array) & 0xFFFF
        else:
            for part in strided(leaf):
                crc = crc32(f"{part.dtype}{tuple(part.shape)}".encode(), crc)
                rows.append(row_sums(part))
    return crc or 1, small, rows


def checksums_of(crc: int, small: int, rows: Iterable[Numbers]) -> tuple[int, int]:
    """Return the checksum of a batch and the sum of its samples, from `BatchSums` on the CPU.

    The sum does not depend on the order of the samples. It can be added up over batches, modulo `SMALL` if all samples
    are small, else modulo 2**32.
    """
    contents, samples = [crc << 32], 0
    for sums in rows:
        contents.append(fold(sums))
        samples += int((sums + (sums >> 32)).sum())  # the lower half of a product does not depend on all bits
    if len(contents) == 1:
        return crc << 32, small % SMALL
    return int(combine(contents)), samples % 2**32


def _is_small(tensor: Tensor) -> bool:
    """True if the samples are small, independent of the number of samples."""
    return tensor.layout is torch.strided and (tensor.dim() == 0 or tensor.nbytes < LARGE * len(tensor))


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
