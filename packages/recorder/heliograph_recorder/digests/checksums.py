"""Checksums of tensors, computed where these lie: no device is waited for.

The words of a tensor are multiplied by fixed odd numbers and added up, modulo 2**64: a single word that differs always
changes the sum, whatever the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .chain import LIMIT

Numbers: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = Numbers | Tensor  # one number for each row of a tensor: an array of those on the CPU
Sum: TypeAlias = int | Tensor  # of what is on the CPU a number from 0 to 2**64, of others a tensor of one int64
WIDTH = 2**14  # words of a row that are multiplied at once
AT_ONCE = 2**22  # and words on a device: it is quick, and slow to be asked; the products take 8 bytes each
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FACTORS = np.random.default_rng(20261126).integers(-(2**63), 2**63, WIDTH) | 1  # odd: each has an inverse
_FACTORS_ON: dict[torch.device, Tensor] = {}


def checksum(tensors: Iterable[Tensor]) -> Sum:
    """Return one checksum of several tensors, in their order."""
    sums: list[Sum] = []
    on_devices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for part in (part.detach() for each in tensors for part in strided(each)):
        if part.is_cpu:
            sums.append(fold(_row_sums_on_cpu(_words(part).numpy())))
        else:
            vector = _words(part.reshape(1, -1))[0]
            on_devices.setdefault((vector.device, vector.dtype), []).append(vector)
    return combine([*sums, *map(_checksum_of_vectors, on_devices.values())])


def _checksum_of_vectors(vectors: Sequence[Tensor]) -> Tensor:
    """Return one checksum of vectors of words on a device, in few operators, and with a copy of few words at a time."""
    pieces = (piece for vector in vectors for piece in torch.split(vector, AT_ONCE))
    sums = [(each * _factors_on(each.device, len(each))).sum() for each in _joined(pieces)]
    return sums[0] if len(sums) == 1 else _checksum_of_vectors([torch.stack(sums)])


def _joined(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield consecutive pieces as one, as many as have at most `AT_ONCE` words; one that is large is not copied."""
    held: list[Tensor] = []
    words = 0
    for piece in pieces:
        if held and words + len(piece) > AT_ONCE:
            yield held[0] if len(held) == 1 else torch.cat(held)
            held, words = [], 0
        held.append(piece)
        words += len(piece)
    yield held[0] if len(held) == 1 else torch.cat(held)


def row_sums(tensor: Tensor) -> Rows:
    """Return a checksum of each row of a tensor, (rows,); a tensor without dimensions has one row."""
    words = _words(tensor.detach())
    return _row_sums_on_cpu(words.numpy()) if words.is_cpu else _row_sums_on_device(words)


def _row_sums_on_cpu(words: NDArray[Any]) -> Numbers:
    total = np.zeros(len(words), np.int64)
    for number, at in enumerate(range(0, words.shape[1], WIDTH)):
        block = words[:, at : at + WIDTH]
        own = block @ _FACTORS[: block.shape[1]]
        total = total + own * _factor(number) if number else own
    return total


def _row_sums_on_device(words: Tensor) -> Tensor:
    """Do the same, with the same result up to `AT_ONCE` words a row."""
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
    """Return one checksum of many numbers, in their order."""
    if len(numbers) <= WIDTH:
        return int(numbers @ _FACTORS[: len(numbers)]) % LIMIT
    parts = [fold(numbers[at : at + WIDTH]) for at in range(0, len(numbers), WIDTH)]
    return sum(part * _factor(place) for place, part in enumerate(parts)) % LIMIT


def combine(parts: Iterable[Sum]) -> Sum:
    """Return one checksum of several, in their order."""
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
    """Return the checksum of a text."""
    return crc32(text.encode(errors="surrogatepass"))


def _factor(number: int) -> int:
    return int(_FACTORS[number % WIDTH])


def _factors_on(device: torch.device, count: int) -> Tensor:
    """Return the factors of the first words of a row, on a device: those of a block times that of the block."""
    known = _FACTORS_ON.get(device)
    if known is None or len(known) < count:
        blocks = 2 ** max(0, (count - 1) // WIDTH).bit_length()
        of_blocks = np.array([1, *_FACTORS[1:blocks]])
        factors = torch.from_numpy((of_blocks[:, None] * _FACTORS).reshape(-1))
        known = _FACTORS_ON[device] = factors.to(device, non_blocking=True)
    return known[:count]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a strided tensor as words, (rows, words of a row): the widest that its place allows."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    rows = real.shape[0] if real.dim() else 1
    if not real.numel():
        return real.new_empty(rows, 0, dtype=torch.int64)
    flat = real.reshape(rows, -1).contiguous()
    size, offset = flat.element_size(), flat.storage_offset() * flat.element_size()
    length = flat.shape[1] * size
    return flat.view(next(each for each in WORDS if length % each.itemsize == 0 and offset % each.itemsize == 0))


def strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that a tensor consists of: itself, a shard of it, or what a sparse one holds."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    if local.is_quantized:
        yield local.int_repr()
    elif local.layout is torch.strided and not local.is_nested:
        yield local
    elif local.layout is torch.sparse_coo:
        yield from (local._indices(), local._values())
    elif local.layout is torch.jagged:
        yield from (local.values(), local.offsets())
    elif local.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (local.crow_indices(), local.col_indices(), local.values())
    elif local.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (local.ccol_indices(), local.row_indices(), local.values())
    elif local.is_nested:
        yield from local.unbind()
    else:
        yield local.to_dense()
