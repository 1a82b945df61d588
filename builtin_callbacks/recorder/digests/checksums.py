"""Checksums of tensors, and of nested values with tensors, computed where these lie: no device is waited for.

The words of a tensor are multiplied by fixed odd numbers and added up, modulo 2**64: a single word that differs always
changes the sum, whatever the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from zlib import adler32, crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .chain import LIMIT

Rows: TypeAlias = NDArray[np.int64] | Tensor  # one number for each row of a tensor: an array of those on the CPU
Sum: TypeAlias = int | Tensor  # of what is on the CPU a number from 0 to 2**64, of others a tensor of one int64
WIDTH = 2**14  # words of a row that are multiplied at once
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
SMALL = 65521  # modulo which Adler-32 adds bytes up
LARGE = 1024  # bytes of a sample, from which on words are added up; fewer take no longer byte by byte
_SEQUENCES = (tuple, list)
_ARRAYS = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
)
_SIMPLE = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8))
_FACTORS = np.random.default_rng(20261126).integers(-(2**63), 2**63, WIDTH) | 1  # odd: each has an inverse
_FORMS: dict[tuple[str, tuple[int, ...]], bytes] = {}
_FACTORS_ON: dict[torch.device, Tensor] = {}


def checksum(tensors: Iterable[Tensor]) -> Sum:
    """Return one checksum of several tensors, in their order."""
    return combine(fold(row_sums(part)) for each in tensors for part in strided(each))


def checksums_of_batch(batch: Any) -> tuple[Sum, Sum]:
    """Return the checksum of a nested value, and a sum of its samples that is the same in any order of them.

    The sums of the batches of an epoch can be added up: modulo `SMALL` where all samples are small, else modulo 2**32.
    Of an object, its attributes count.
    """
    try:
        return _of_small(batch)
    except (TypeError, ValueError, BufferError, RuntimeError):  # it is anything else than small arrays of the CPU
        return _of_any(batch)


def _of_small(batch: Any) -> tuple[int, int]:
    """Return what `checksums_of_batch` does of a sequence of small tensors on the CPU; raise for anything else."""
    crc, small = 0, 0
    for leaf in batch if batch.__class__ in _SEQUENCES else (batch,):
        if leaf.__class__ is not Tensor:
            raise TypeError
        array: Any = leaf.numpy()
        if array.nbytes >= LARGE * len(array):
            raise ValueError
        crc = crc32(array, crc32(_form(array), crc))
        small += adler32(array) & 0xFFFF  # the sum of its bytes
    return crc << 32, small % SMALL


def _of_any(batch: Any) -> tuple[Sum, Sum]:
    crc, small = 0, 0
    large: list[tuple[Sum, Sum]] = []
    for leaf in _leaves(batch, ()):
        if isinstance(leaf, int):
            crc = crc32(leaf.to_bytes(4, "little"), crc)
        elif leaf.is_cpu and leaf.dtype in _SIMPLE and _is_small(leaf):
            array: Any = leaf.detach().contiguous().numpy()
            crc = crc32(array, crc32(_form(array), crc))
            small += adler32(array) & 0xFFFF
        else:
            for part in strided(leaf):
                rows = row_sums(part)
                crc = crc32(f"{part.dtype}{tuple(part.shape)}".encode(), crc)
                either_half = (rows + (rows >> 32)).sum()  # the lower half of a product does not depend on all bits
                large.append((fold(rows), either_half if isinstance(rows, Tensor) else int(either_half)))
    if not large:
        return crc << 32, small % SMALL
    return combine([crc << 32, *(content for content, _ in large)]), sum(samples for _, samples in large) % 2**32


def _form(array: Any) -> bytes:
    """Return the type and the shape of an array, as bytes: made once for each."""
    key = array.dtype.char, array.shape
    if (form := _FORMS.get(key)) is None:
        form = _FORMS[key] = repr(key).encode()
    return form


def _is_small(tensor: Tensor) -> bool:
    """Return whether the samples are small: the same for all batches of them."""
    return tensor.layout is torch.strided and (tensor.dim() == 0 or tensor.nbytes < LARGE * len(tensor))


def row_sums(tensor: Tensor) -> Rows:
    """Return a checksum of each row of a tensor, (rows,); a tensor without dimensions has one row."""
    words = _words(tensor.detach())
    blocks = range(0, words.shape[1], WIDTH)
    total: Rows
    if words.is_cpu:
        array, total = words.numpy(), np.zeros(len(words), np.int64)
        for number, at in enumerate(blocks):
            block = array[:, at : at + WIDTH]
            own = block @ _FACTORS[: block.shape[1]]
            total = total + own * _factor(number) if number else own
        return total
    factors, total = _factors_on(words.device), words.new_zeros(len(words), dtype=torch.int64)
    for number, at in enumerate(blocks):
        part = words[:, at : at + WIDTH]
        total = total + (part * factors[: part.shape[1]]).sum(1) * _factor(number)
    return total


def fold(rows: Rows) -> Sum:
    """Return one checksum of many, in their order."""
    blocks = range(0, len(rows), WIDTH)
    if isinstance(rows, Tensor):
        factors = _factors_on(rows.device)
        return combine((part * factors[: len(part)]).sum() for part in torch.split(rows, WIDTH))
    if len(rows) <= WIDTH:
        return int(rows @ _FACTORS[: len(rows)]) % LIMIT
    return combine(fold(rows[at : at + WIDTH]) for at in blocks)


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


def _factors_on(device: torch.device) -> Tensor:
    if device not in _FACTORS_ON:
        _FACTORS_ON[device] = torch.from_numpy(_FACTORS).to(device)
    return _FACTORS_ON[device]


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


def _leaves(value: Any, above: tuple[int, ...]) -> Iterator[Tensor | int]:
    """Yield the tensors of a nested value, and the checksums of all else in it; what contains itself comes once."""
    if isinstance(value, Tensor):
        yield from strided(value)
    elif isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS and value.dtype.isnative:
        array = np.ascontiguousarray(value)
        yield torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns of what is read-only
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield crc32(value.tobytes(), text_checksum(f"{value.dtype}{value.shape}"))
    elif isinstance(value, SCALARS):
        yield text_checksum(repr(value))
    elif id(value) not in above:
        for part in _parts(value):
            yield from _leaves(part, (*above, id(value)))


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a container or of another object; the names of what has names are parts too."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, np.ndarray):  # of objects
        return [value.shape, *value.flat]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return [type(value).__qualname__, {**held, **getattr(value, "__dict__", {})}]


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
