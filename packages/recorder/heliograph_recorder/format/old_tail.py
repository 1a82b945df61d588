"""The tails of older versions, which had a row for every batch: read when the run was killed before an update."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

BEGIN = 128  # of the rows
BATCH, TOKENS = 7, 6  # columns
HEADS = {b"HelioRow": struct.Struct("<8s16s9qddq"), b"HelioRo2": struct.Struct("<8s16s9qddqq")}
COLUMNS = {b"HelioRow": 7, b"HelioRo2": 8}  # the first version did not count tokens


def parse_old_tail(data: bytes) -> tuple[tuple[Any, ...], NDArray[np.int64]] | None:
    """Return the head and the counters of each complete batch as the present version has them, None for no tail.

    The last number of a row, its batch, was written last, so an incomplete row has a 0.
    """
    magic = data[:8]
    if magic not in HEADS or len(data) < BEGIN + COLUMNS[magic] * 8:
        return None
    head, columns = HEADS[magic].unpack_from(data), COLUMNS[magic]
    rows = (len(data) - BEGIN) // (columns * 8)
    table = np.frombuffer(data, "<i8", rows * columns, BEGIN).reshape(rows, columns)
    if columns == TOKENS + 1:
        head, table = (*head[:-1], 0, head[-1]), np.insert(table, TOKENS, 0, axis=1)
    incomplete = np.flatnonzero(table[:, BATCH] == 0)
    return head, table[: int(incomplete[0]) if len(incomplete) else rows]
