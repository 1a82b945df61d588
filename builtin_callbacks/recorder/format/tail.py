"""The tail: the open block of batches, in a mapped file that survives a kill of the process.

It has a head (the attempt, the block's number and first counters) and a row for every batch. The last number of the
head and of each row is never 0 and is written last, so a kill within a row leaves a 0.
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

from .lines import ROWS, counter_values, encode_rows
from .records import Counters

HEAD = struct.Struct("<8s16s9qddqq")  # magic, attempt, counters, clock, tokens, number
ROW = struct.Struct("<8q")  # centiseconds, steps, skipped_steps, skipped_batches, samples, window, tokens, batch
MAGIC = b"HelioRo2"
OLD_HEAD, OLD_ROW, OLD_MAGIC = struct.Struct("<8s16s9qddq"), struct.Struct("<7q"), b"HelioRow"  # without tokens
BEGIN = 128
SIZE = BEGIN + ROWS * ROW.size
SKIPPED, TOKENS, BATCH = 3, 6, 7  # columns of a row
LIMIT = 2**52  # larger than any real counter


def tail_path(path: Path) -> Path:
    """Return the path of a recording's tail."""
    return path.with_name(path.name + ".tail")


@dataclass(frozen=True, slots=True)
class Rows:
    """The complete rows of a tail.

    Attributes:
        attempt: its name.
        number: of the block, within the attempt; 0 for none.
        first: the counters before the first batch.
        clock: seconds since the attempt began, at these counters.
        rows: their bytes.
    """

    attempt: str
    number: int
    first: Counters
    clock: float
    rows: bytes

    @property
    def table(self) -> NDArray[np.int64]:
        """The rows, (batches, 8)."""
        return np.frombuffer(self.rows, np.int64).reshape(-1, ROW.size // 8)

    @property
    def skips(self) -> list[bool]:
        """Which of the batches were skipped."""
        skipped: list[int] = [self.first.skipped_batches, *self.table[:, SKIPPED].tolist()]
        return [before != after for before, after in pairwise(skipped)]

    def lines(self, losses: Sequence[float] | None = None) -> list[str]:
        """Return the lines of the block: several if there are gaps between batches, since a recorder was disabled."""
        table, first = self.table, self.first
        lines: list[str] = []
        for begin, end in self._parts(table):
            part = table[begin:end]
            *_, batch = part[0].tolist()
            first = replace(first, batch=batch - 1)
            *counters, batch = part[-1].tolist()
            clock = self.clock + counters[0] / 100 - self.first.seconds
            own = None if losses is None else losses[begin:end]
            lines.append(encode_rows((self.number, len(lines)), first, clock, part[:, :BATCH], own))
            first = _counters_after(first, counters, batch)
        return lines

    @property
    def last(self) -> Counters:
        """The counters after the last of them."""
        *counters, batch = self.table[-1].tolist()
        return _counters_after(self.first, counters, batch)

    @staticmethod
    def _parts(table: NDArray[np.int64]) -> list[tuple[int, int]]:
        batches = table[:, BATCH]
        if batches[-1] - batches[0] == len(batches) - 1:
            return [(0, len(batches))]
        jumps = np.flatnonzero(np.diff(batches) != 1) + 1
        return list(pairwise([0, *jumps.tolist(), len(batches)]))


class Tail:
    """The tail of one writer.

    Rows that are packed into the shared mapping `buffer` are in the file at no further cost. Its disk space is
    allocated first, so that a full disk is an OSError here and not a SIGBUS later. If that fails, `buffer` is memory,
    and `write_row` writes each row to the file, if there is one.

    Args:
        path: the file; None for rows in memory only.

    Attributes:
        buffer: rows are packed here with `ROW`, the first at `BEGIN`.
        obstacle: why the file is not mapped, None if it is.
        filled: the end of the rows of the former block, at most.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.filled = path, SIZE
        self.obstacle: OSError | None = None
        self.buffer: mmap.mmap | bytearray
        self._file = -1
        try:
            if path is None:
                raise OSError("there is no file")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            _allocate(self._file)
            self.buffer = mmap.mmap(self._file, SIZE)
        except OSError as error:
            self.obstacle, self.buffer = error, bytearray(SIZE)

    def begin(self, attempt: str, number: int, first: Counters, clock: float) -> None:
        """Clear the former block, and begin one.

        Raises:
            OSError: the file is not mapped and cannot be written.
        """
        self.buffer[HEAD.size - 8 : self.filled] = bytes(self.filled - HEAD.size + 8)  # the number and the rows
        self.filled = SIZE
        counters = counter_values(replace(first, tokens=0))
        HEAD.pack_into(self.buffer, 0, MAGIC, attempt.encode(), *counters, clock, first.tokens, number)
        if self.obstacle is not None and self._file >= 0:
            os.ftruncate(self._file, 0)  # removes the former rows
            os.pwrite(self._file, self.buffer[:BEGIN], 0)

    def write_row(self, at: int) -> None:
        """Write a packed row to the file, unless that is mapped.

        Raises:
            OSError: it cannot be written.
        """
        if self.obstacle is not None and self._file >= 0:
            os.pwrite(self._file, self.buffer[at : at + ROW.size], at)

    def rows(self, end: int) -> Rows:
        """Return the rows up to an offset of the buffer."""
        _, attempt, *first, clock, tokens, number = HEAD.unpack_from(self.buffer)
        rows = bytes(self.buffer[BEGIN:end])
        return Rows(attempt.rstrip(b"\0").decode(), number, replace(Counters(*first), tokens=tokens), clock, rows)

    def close(self, *, remove: bool = True) -> None:
        """Close the file; if it is kept, the next writer of the recording adds its rows."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)


def _allocate(file: int) -> None:
    """Make a file `SIZE` bytes long, and allocate them on the disk.

    Raises:
        OSError: the disk is full.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, SIZE)
    elif os.write(file, bytes(SIZE)) < SIZE:  # on macOS, for example
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_tail(path: Path) -> Rows | None:
    """Return the rows in the tail of a recording, None if there are none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return parse_tail(tail_path(path).read_bytes())
    except FileNotFoundError:
        return None


def parse_tail(data: bytes) -> Rows | None:
    """Return the complete rows of a tail, None if it has none.

    Raises:
        ValueError: it is damaged.
    """
    if data.startswith(OLD_MAGIC):
        data = _with_tokens(data)
    if len(data) < BEGIN + ROW.size or not data.startswith(MAGIC):
        return None
    _, attempt, *first, clock, tokens, number = HEAD.unpack_from(data)
    if not number:
        return None
    size = (len(data) - BEGIN) // ROW.size
    table = np.frombuffer(data, "<i8", size * ROW.size // 8, BEGIN).reshape(size, -1)
    incomplete = np.flatnonzero(table[:, BATCH] == 0)
    count = int(incomplete[0]) if len(incomplete) else size
    if not _is_plausible([*first, abs(clock), tokens, number], table[:count]):  # a clock may begin slightly below 0
        raise ValueError("the tail is damaged")
    rows = data[BEGIN : BEGIN + count * ROW.size]
    name = attempt.rstrip(b"\0").decode(errors="replace")
    return Rows(name, number, replace(Counters(*first), tokens=tokens), clock, rows) if count else None


def _with_tokens(data: bytes) -> bytes:
    """Return a tail of an older version, in which tokens are not counted, as this one writes it."""
    size = (len(data) - BEGIN) // OLD_ROW.size
    if size < 1:
        return b""
    *head, number = OLD_HEAD.unpack_from(data)
    table = np.frombuffer(data, "<i8", size * OLD_ROW.size // 8, BEGIN).reshape(size, -1)
    return HEAD.pack(MAGIC, *head[1:], 0, number) + np.insert(table, TOKENS, 0, axis=1).tobytes()


def _is_plausible(head: Sequence[float], table: NDArray[np.int64]) -> bool:
    """Return whether the numbers are in range and the counters never decrease."""
    rising = np.diff(table[:, [1, 2, 3, 4, TOKENS, BATCH]], axis=0)  # all but the clock and the window
    return all(0 <= each < LIMIT for each in head) and bool(
        (table >= 0).all() and (table < LIMIT).all() and (rising >= 0).all()
    )


def _counters_after(first: Counters, counters: list[int], batch: int) -> Counters:
    hundredths, steps, skipped_steps, skipped_batches, samples, _, tokens = counters
    return Counters(
        first.epoch, batch, first.earlier_batches, steps, skipped_steps, skipped_batches, samples,
        first.validations, first.evaluated, hundredths / 100, tokens,
    )  # fmt: skip
