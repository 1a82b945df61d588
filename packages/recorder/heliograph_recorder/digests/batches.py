"""The checksums of a batch: of what it consists of, and of its samples in whatever order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import adler32, crc32

import numpy as np
import torch
from torch import Tensor

from .checksums import Numbers, Rows, combine, fold, row_sums, strided, text_checksum

# Of a batch that was read: a checksum, a sum over its small samples, and the checksums of the rows of large tensors.
BatchSums: TypeAlias = tuple[int, int, Sequence[Rows]]
SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
SMALL = 65521  # modulo which Adler-32 adds bytes up
LARGE = 1024  # bytes of a sample, from which on words are added up; fewer take no longer byte by byte
_SEQUENCES = (tuple, list)
_ARRAYS = frozenset(
    ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
)
_SIMPLE = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8))
_FORMS: dict[tuple[str, tuple[int, ...]], bytes] = {}  # of arrays of small samples


def read_batch(batch: Any) -> BatchSums:
    """Read a nested value: as little as what lies on a device allows; `checksums_of` does the rest, later.

    Of an object, its attributes count. The checksum is never 0, also where there is nothing: 0 is of what was not read.
    """
    # The usual case, a sequence of small tensors on the CPU, is read here without a further call.
    crc, small = 0, 0
    try:
        for leaf in batch if batch.__class__ in _SEQUENCES else (batch,):
            if leaf.__class__ is not Tensor or not leaf.is_cpu:
                break
            array: Any = leaf.numpy()
            form = _FORMS.get((array.dtype.char, array.shape))
            if form is None:
                if array.nbytes >= LARGE * len(array):
                    break
                form = _form(array)
            crc = crc32(array, crc32(form, crc))
            small += adler32(array) & 0xFFFF  # the sum of its bytes
        else:
            return crc or 1, small, ()
    except (TypeError, ValueError, BufferError, RuntimeError):  # no array whose bytes can be read
        return _read_any(batch)
    return _read_any(batch)


def checksums_of(crc: int, small: int, rows: Iterable[Numbers]) -> tuple[int, int]:
    """Return the checksum of a batch, and a sum of its samples that is the same in any order of them.

    The sums of the batches of an epoch can be added up: modulo `SMALL` where all samples are small, else modulo 2**32.

    Args:
        crc: the first of `BatchSums`.
        small: the second.
        rows: the third, on the CPU.
    """
    contents, samples = [crc << 32], 0
    for each in rows:
        contents.append(fold(each))
        samples += int((each + (each >> 32)).sum())  # the lower half of a product does not depend on all bits
    if len(contents) == 1:
        return crc << 32, small % SMALL
    return int(combine(contents)), samples % 2**32


def _read_any(batch: Any) -> BatchSums:
    crc, small = 0, 0
    rows: list[Rows] = []
    for leaf in _leaves(batch, ()):
        if isinstance(leaf, int):
            crc = crc32(leaf.to_bytes(4, "little"), crc)
        elif leaf.is_cpu and leaf.dtype in _SIMPLE and _is_small(leaf):
            array: Any = leaf.detach().contiguous().numpy()
            crc = crc32(array, crc32(_form(array), crc))
            small += adler32(array) & 0xFFFF
        else:
            for part in strided(leaf):
                crc = crc32(f"{part.dtype}{tuple(part.shape)}".encode(), crc)
                rows.append(row_sums(part))
    return crc or 1, small, rows


def _form(array: Any) -> bytes:
    """Return the type and the shape of an array of small samples, as bytes: made once for each."""
    key = array.dtype.char, array.shape
    if (form := _FORMS.get(key)) is None:
        form = _FORMS[key] = repr(key).encode()
    return form


def _is_small(tensor: Tensor) -> bool:
    """Return whether the samples are small: the same for all batches of them."""
    return tensor.layout is torch.strided and (tensor.dim() == 0 or tensor.nbytes < LARGE * len(tensor))


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
