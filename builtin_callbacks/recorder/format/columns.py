"""A column of numbers as a few characters of text, exact to the last bit."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Packed = int | list[str]
WIDTHS = ("<i1", "<i2", "<i4", "<i8")
FLOATS = ("<f4", "<f8")
LARGEST = 2**52  # more than anything counts up to in a step
SMALL = 256  # bytes: what is shorter is not compressed, which would take longer than all else


def pack(steps: NDArray[np.int64], least: int, most: int) -> Packed:
    """Return the steps between whole numbers: one number where all are alike, else the smallest type, compressed.

    Args:
        steps: the first counted from a number that the reader knows.
        least: the least of them.
        most: the largest.
    """
    if least == most:
        return least
    if least >= -0x80 and most < 0x80:
        return _compressed(steps.astype("<i1"))
    width = next(each for each in WIDTHS if np.iinfo(each).min <= least and most <= np.iinfo(each).max)
    return _compressed(steps.astype(width))


def unpack(packed: Packed, rows: int, first: int) -> tuple[int, ...]:
    """Return the whole numbers again.

    Raises:
        ValueError: it is no packed column of so many rows.
    """
    if isinstance(packed, int):
        if abs(packed) > LARGEST:
            raise ValueError(f"a column with steps of more than {LARGEST}")
        return tuple(range(first + packed, first + packed * (rows + 1), packed)) if packed else (first,) * rows
    steps = _decompressed(packed, rows, WIDTHS)
    return tuple((np.cumsum(steps, dtype=np.int64) + first).tolist())


def pack_floats(values: Sequence[float]) -> list[str]:
    """Return numbers in the smaller type where it holds each of them, NaN included."""
    wide = np.asarray(values, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    exact = narrow.astype("<f8").tobytes() == wide.tobytes()
    return _compressed(narrow if exact else wide)


def unpack_floats(packed: list[str], rows: int) -> tuple[float, ...]:
    """Return the numbers again.

    Raises:
        ValueError: it is no packed column of so many rows.
    """
    return tuple(_decompressed(packed, rows, FLOATS).astype("<f8").tolist())


def _compressed(values: NDArray[Any]) -> list[str]:
    data, kind = values.tobytes(), f"<{values.dtype.kind}{values.itemsize}"
    if len(data) < SMALL:
        return [kind, binascii.b2a_base64(data, newline=False).decode()]
    return ["z" + kind, binascii.b2a_base64(zlib.compress(data, 1), newline=False).decode()]


def _decompressed(packed: list[str], rows: int, types: Sequence[str]) -> NDArray[Any]:
    kind, text = packed
    if kind.removeprefix("z") not in types:
        raise ValueError(f"a column of type {kind!r}")
    data = base64.b64decode(text, validate=True)
    size = np.dtype(kind.removeprefix("z")).itemsize * rows
    if kind.startswith("z"):
        try:
            data = zlib.decompressobj().decompress(data, size + 1)
        except zlib.error as error:
            raise ValueError(f"a column that is damaged: {error}") from None
    if len(data) != size:
        raise ValueError(f"a column of other than {rows} rows")
    return np.frombuffer(data, kind.removeprefix("z"))
