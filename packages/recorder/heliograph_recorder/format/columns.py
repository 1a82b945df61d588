"""Encode a column of numbers as a short text, exact to the last bit."""

from __future__ import annotations

import binascii
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = int | list[str]
WIDTHS = ("<i1", "<i2", "<i4", "<i8")
MIN_COMPRESSED = 256  # bytes; compressing less takes longer than the encoding


def pack(steps: NDArray[np.int64], least: int, most: int) -> Packed:
    """Encode the differences between integers: one number if all are equal, else the smallest type, compressed.

    The first difference is the one from a number that the reader knows.
    """
    if least == most:
        return least
    if least >= -0x80 and most < 0x80:
        return _encode(steps.astype("<i1"))
    width = next(width for width in WIDTHS if np.iinfo(width).min <= least and most <= np.iinfo(width).max)
    return _encode(steps.astype(width))


def unpack(packed: Packed, rows: int, first: int) -> Sequence[int]:
    if isinstance(packed, int):
        return range(first + packed, first + packed * (rows + 1), packed) if packed else (first,) * rows
    steps = _decode(packed, rows)
    return array("q", (np.cumsum(steps, dtype=np.int64) + first).tobytes())


def pack_floats(values: Sequence[float]) -> list[str]:
    """Encode numbers as float32 if that is exact for all of them, NaN included, else as float64."""
    wide = np.asarray(values, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = narrow.astype("<f8").tobytes() == wide.tobytes()
    return _encode(narrow if exact else wide)


def unpack_floats(packed: list[str], rows: int) -> Sequence[float]:
    return array("d", _decode(packed, rows).astype(np.float64).tobytes())


def pack_words(words: Sequence[int]) -> Packed:
    numbers = np.asarray(words, "<u4")
    return int(numbers[0]) if (numbers == numbers[0]).all() else _encode(numbers)


def unpack_words(packed: Packed, rows: int) -> Sequence[int]:
    if isinstance(packed, int):
        return array("I", [packed]) * rows
    return array("I", _decode(packed, rows).astype(np.uint32).tobytes())


def _encode(values: NDArray[Any]) -> list[str]:
    data, kind = values.tobytes(), f"<{values.dtype.kind}{values.itemsize}"
    if len(data) < MIN_COMPRESSED:
        return [kind, binascii.b2a_base64(data, newline=False).decode()]
    return ["z" + kind, binascii.b2a_base64(zlib.compress(data, 1), newline=False).decode()]


def _decode(packed: list[str], rows: int) -> NDArray[Any]:
    kind, text = packed
    data = binascii.a2b_base64(text)
    if kind.startswith("z"):
        data = zlib.decompress(data)
    values = np.frombuffer(data, kind.removeprefix("z"))
    if len(values) != rows:
        raise ValueError(f"a column with {len(values)} values instead of {rows}")
    return values
