"""The open block of batches, in a file that the system keeps however the process ends.

A fixed head (whose block it is, and where it begins) and a row for every batch. The last number of the head and of each
row is never 0 where they are whole, and is written last: a kill amid a row leaves a 0.
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

from .lines import ROWS, encode_rows, tuple_of
from .records import Counters

HEAD = struct.Struct("<8s16s9qddq")  # magic, attempt, the place, clock, number
ROW = struct.Struct("<7q")  # centiseconds, steps, skipped_steps, skipped_batches, samples, window, batch
MAGIC = b"HelioRow"
BEGIN = 128
SIZE = BEGIN + ROWS * ROW.size
SKIPPED, BATCH = 3, 6  # columns of a row
MOST = 2**52  # more than anything counts up to


def tail_path(path: Path) -> Path:
    """Return where a recording's open block lies."""
    return path.with_name(path.name + ".tail")


@dataclass(frozen=True, slots=True)
class Rows:
    """A block of batches as it lies in a tail.

    Attributes:
        attempt: whose.
        number: the block's, within the attempt; 0 for none.
        first: the place before the first batch.
        clock: seconds since the attempt began, at the first place.
        rows: those that are whole, one after another.
    """

    attempt: str
    number: int
    first: Counters
    clock: float
    rows: bytes

    @property
    def table(self) -> NDArray[np.int64]:
        """The rows as an array, (batches, 7)."""
        return np.frombuffer(self.rows, np.int64).reshape(-1, ROW.size // 8)

    @property
    def skips(self) -> list[bool]:
        """Which of the batches were left out."""
        skipped: list[int] = [self.first.skipped_batches, *self.table[:, SKIPPED].tolist()]
        return [before != behind for before, behind in pairwise(skipped)]

    def lines(self, losses: Sequence[float] | None = None) -> list[str]:
        """Return the lines of the block: more than one, where batches between them were not heard of."""
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
            first = _behind(first, counters, batch)
        return lines

    @property
    def last(self) -> Counters:
        """The place behind the last of them."""
        *counters, batch = self.table[-1].tolist()
        return _behind(self.first, counters, batch)

    @staticmethod
    def _parts(table: NDArray[np.int64]) -> list[tuple[int, int]]:
        batches = table[:, BATCH]
        if batches[-1] - batches[0] == len(batches) - 1:
            return [(0, len(batches))]
        jumps = np.flatnonzero(np.diff(batches) != 1) + 1
        return list(pairwise([0, *jumps.tolist(), len(batches)]))


class Tail:
    """The open block of one writer.

    A shared mapping costs nothing to keep: what is packed into `buffer` is the file's. Its room is taken beforehand,
    so that a full disk is an OSError here and not a signal there. Where that cannot be done, `buffer` is memory, and
    `keep` writes each row, as far as there is a file at all.

    Args:
        path: the file; None for rows in memory, which a kill loses.

    Attributes:
        buffer: where rows are packed with `ROW`, the first at `BEGIN`.
        obstacle: why it is no mapping, None where it is one.
        filled: where the rows end, once they do; until then anywhere.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.filled = path, SIZE
        self.obstacle: OSError | None = None
        self.buffer: mmap.mmap | bytearray
        self._file = -1
        try:
            if path is None:
                raise OSError("without a file")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            _take_room(self._file)
            self.buffer = mmap.mmap(self._file, SIZE)
        except OSError as error:
            self.obstacle, self.buffer = error, bytearray(SIZE)

    def begin(self, attempt: str, number: int, first: Counters, clock: float) -> None:
        """Forget the former block, and begin one.

        Raises:
            OSError: it is no mapping, and cannot be written.
        """
        self.buffer[HEAD.size - 8 : self.filled] = bytes(self.filled - HEAD.size + 8)  # the number, then the rows
        self.filled = SIZE
        HEAD.pack_into(self.buffer, 0, MAGIC, attempt.encode(), *tuple_of(first), clock, number)
        if self.obstacle is not None and self._file >= 0:
            os.ftruncate(self._file, 0)  # and with it the former rows
            os.pwrite(self._file, self.buffer[:BEGIN], 0)

    def keep(self, at: int) -> None:
        """Write the row that was packed into memory; a mapping needs no such thing.

        Raises:
            OSError: it cannot be written.
        """
        if self.obstacle is not None and self._file >= 0:
            os.pwrite(self._file, self.buffer[at : at + ROW.size], at)

    def rows(self, end: int) -> Rows:
        """Return the block as it is so far, whose rows end there."""
        _, attempt, *place, clock, number = HEAD.unpack_from(self.buffer)
        return Rows(attempt.rstrip(b"\0").decode(), number, Counters(*place), clock, bytes(self.buffer[BEGIN:end]))

    def close(self, *, remove: bool = True) -> None:
        """Let go of it; whoever goes on in the recording takes in what it holds, unless it is removed."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)
        if self._file >= 0:
            os.close(self._file)


def _take_room(file: int) -> None:
    """Make a file `SIZE` bytes long, with room for them on the disk.

    Raises:
        OSError: there is none.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, SIZE)
    elif os.write(file, bytes(SIZE)) < SIZE:  # macOS, say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_tail(path: Path) -> Rows | None:
    """Return the open block beside a recording, None where there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return parse_tail(tail_path(path).read_bytes())
    except FileNotFoundError:
        return None


def parse_tail(data: bytes) -> Rows | None:
    """Return the whole rows of a tail, None where it holds none.

    Raises:
        ValueError: it is damaged.
    """
    if len(data) < BEGIN + ROW.size or not data.startswith(MAGIC):
        return None
    _, attempt, *place, clock, number = HEAD.unpack_from(data)
    if not number:
        return None
    room = (len(data) - BEGIN) // ROW.size
    table = np.frombuffer(data, "<i8", room * ROW.size // 8, BEGIN).reshape(room, -1)
    torn = np.flatnonzero(table[:, BATCH] == 0)
    whole = int(torn[0]) if len(torn) else room
    if not _is_plausible([*place, abs(clock), number], table[:whole]):  # a clock may begin a little below 0
        raise ValueError("the block that was open is damaged")
    rows = data[BEGIN : BEGIN + whole * ROW.size]
    name = attempt.rstrip(b"\0").decode(errors="replace")
    return Rows(name, number, Counters(*place), clock, rows) if whole else None


def _is_plausible(head: Sequence[float], table: NDArray[np.int64]) -> bool:
    """Return whether numbers are counters and times, and the counters never go back."""
    rising = np.diff(table[:, [1, 2, 3, 4, BATCH]], axis=0)  # all but the clock, and the window
    return all(0 <= each < MOST for each in head) and bool(
        (table >= 0).all() and (table < MOST).all() and (rising >= 0).all()
    )


def _behind(first: Counters, counters: list[int], batch: int) -> Counters:
    hundredths, steps, skipped_steps, skipped_batches, samples, _ = counters
    return Counters(
        first.epoch, batch, first.earlier_batches, steps, skipped_steps, skipped_batches, samples,
        first.validations, first.evaluated, hundredths / 100,
    )  # fmt: skip
