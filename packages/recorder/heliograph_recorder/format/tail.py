"""Store the open block of batches in the tail, a mapped file that survives a kill of the process.

The tail consists of a head (the attempt, the block's number and first counters) and a row for every batch. The first
value of a row, its batch, is never 0, and written last. So is the number in the head. A kill during a write leaves a 0
there, and a reader sees a number or a batch only with its other values.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .lines import ROWS, Items, block_items, counter_values
from .records import Counters

HEAD = struct.Struct("<8sq16s9qdqd")  # magic, number, attempt, counters, clock
ROW = struct.Struct("<8q")  # batch, centiseconds, steps, skipped_steps, skipped_batches, samples, window, tokens
INTEGER = struct.Struct("<q")
MAGIC = b"HelioRo5"
NUMBER = len(MAGIC)  # the offset of the number in the head
BEGIN = HEAD.size  # of the rows
SIZE = BEGIN + ROWS * ROW.size
BATCH, SKIPPED, WINDOW = 0, 4, 6  # columns of a row
LIMIT = 2**50  # larger than any real counter; a block of such values fits in 64 bits


def tail_path(path: Path) -> Path:
    return path.with_name(path.name + ".tail")


@dataclass(frozen=True, slots=True)
class TailRows:
    """The complete batches of a tail.

    Attributes:
        attempt: the name of the attempt.
        number: the number of the block within the attempt; 0 for none.
        first: the counters before the first batch.
        clock: seconds since the attempt began, at `first`.
        table: (batches, 8), the columns of `ROW`.
    """

    attempt: str
    number: int
    first: Counters
    clock: float
    table: NDArray[np.int64]

    @property
    def skips(self) -> list[bool]:  # by batch, whether it was skipped
        skipped: list[int] = [self.first.skipped_batches, *self.table[:, SKIPPED].tolist()]
        return [before != after for before, after in pairwise(skipped)]

    def arrays(self, losses: Sequence[float] | None = None) -> list[Items]:
        """Return the arrays of the lines of the block: several if there are gaps, because a recorder was disabled."""
        table, first = self.table, self.first
        if not len(table):
            return []
        arrays: list[Items] = []
        for begin, end in self._parts(table):
            part = table[begin:end]
            first = replace(first, batch=int(part[0, BATCH]) - 1)
            clock = self.clock + int(part[-1, 1]) / 100 - self.first.seconds
            part_losses = None if losses is None else losses[begin:end]
            arrays.append(block_items((self.number, len(arrays)), first, clock, part[:, 1:], part_losses))
            first = _counters_after(first, part[-1].tolist())
        return arrays

    @property
    def last(self) -> Counters:
        return _counters_after(self.first, self.table[-1].tolist())

    @staticmethod
    def _parts(table: NDArray[np.int64]) -> list[tuple[int, int]]:
        batches = table[:, BATCH]
        if batches[-1] - batches[0] == len(batches) - 1:
            return [(0, len(batches))]
        jumps = np.flatnonzero(np.diff(batches) != 1) + 1
        return list(pairwise([0, *jumps.tolist(), len(batches)]))


class Tail:
    """The tail of one writer.

    A write to the shared mapping `buffer` reaches the file without a system call. The disk space is allocated first, so
    that a full disk raises OSError here instead of SIGBUS later. If the mapping fails, `buffer` is in memory, and a
    kill loses the batches in it.

    Args:
        path: the file; None for batches in memory only.

    Attributes:
        buffer: the content.
        obstacle: why the mapping failed, None if it did not.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.obstacle: OSError | None = None
        self.buffer: mmap.mmap | bytearray = bytearray(SIZE)
        self._used = 0
        if path is None:
            return
        try:
            with path.open("w+b") as file:
                _allocate(file.fileno())
                self.buffer = mmap.mmap(file.fileno(), SIZE)
        except OSError as error:
            self.obstacle = error

    def begin(self, attempt: str, number: int, first: Counters, clock: float) -> None:
        INTEGER.pack_into(self.buffer, NUMBER, 0)
        self.buffer[BEGIN : BEGIN + self._used * ROW.size] = bytes(self._used * ROW.size)
        self._used = 0
        HEAD.pack_into(self.buffer, 0, MAGIC, 0, attempt.encode(), *counter_values(first), clock)
        INTEGER.pack_into(self.buffer, NUMBER, number)

    def add(self, index: int, batch: int, *values: int) -> None:
        """Write the row of a batch; an interrupted one is written again."""
        at = BEGIN + index * ROW.size
        self._used = index + 1
        ROW.pack_into(self.buffer, at, 0, *values)
        INTEGER.pack_into(self.buffer, at, batch)

    def rows(self, count: int) -> TailRows:
        _, number, attempt, *first, clock = HEAD.unpack_from(self.buffer)
        return TailRows(attempt.rstrip(b"\0").decode(), number, Counters(*first), clock, _table_of(self.buffer, count))

    def close(self, *, remove: bool = True) -> None:
        """Close the file. If it is not removed, the next writer of the recording adds its batches."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)


def _table_of(buffer: bytes | bytearray | mmap.mmap, count: int = ROWS) -> NDArray[np.int64]:
    """Return the rows before the first incomplete one, at most `count`, as a copy."""
    table = np.frombuffer(bytes(buffer[BEGIN : BEGIN + count * ROW.size]), "<i8").reshape(-1, ROW.size // 8)
    empty = (table[:, BATCH] == 0).nonzero()[0]
    return table[: empty[0]] if len(empty) else table


def _allocate(file: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, SIZE)
    elif os.write(file, bytes(SIZE)) < SIZE:  # on macOS, for example
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_tail(path: Path) -> bytes:
    try:
        return tail_path(path).read_bytes()
    except FileNotFoundError:
        return b""


def parse_tail(data: bytes) -> TailRows | None:
    """Return the batches of a tail, None if it has none."""
    if not data.startswith(MAGIC) or len(data) < SIZE:  # it is being created
        return None
    _, number, attempt, *first, clock = HEAD.unpack_from(data)
    table = _table_of(data)
    if not number or not len(table):
        return None
    head = [*first, abs(clock), number]  # a clock may begin slightly below 0
    if not _is_plausible(head, table):
        raise ValueError("the tail is damaged")
    name = attempt.rstrip(b"\0").decode(errors="replace")
    return TailRows(name, number, Counters(*first), clock, table)


def _is_plausible(head: Sequence[float], table: NDArray[np.int64]) -> bool:
    increases = np.diff(np.delete(table, [1, WINDOW], axis=1), axis=0)  # all but the clock and the window
    return all(0 <= value < LIMIT for value in head) and bool(
        (table >= 0).all() and (table < LIMIT).all() and (increases >= 0).all()
    )


def _counters_after(first: Counters, row: list[int]) -> Counters:
    batch, hundredths, steps, skipped_steps, skipped_batches, samples, _, tokens = row
    return Counters(
        first.epoch, batch, first.earlier_batches, steps, skipped_steps, skipped_batches, samples,
        first.validations, first.evaluated, hundredths / 100, tokens,
    )  # fmt: skip
