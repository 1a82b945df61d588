"""Store the open block of batches in the tail, a mapped file that survives a kill of the process.

The tail consists of a head (the attempt, the block's number and first counters), a mark for every batch (one byte), and
rows. Most batches are regular: one more batch, step and `size` samples than the previous batch. The mark of a regular
batch is 1 plus the hundredths of a second since the previous batch. Any other batch has a row with all its counters.
Values that are never 0 are written last: the number in the head, and the mark of a batch after its row. A kill during a
write leaves a 0 there.

After the rows come notes: the lines that the recording gets with the block, each after a newline. The first newline of
a write is written last, after the 0 that ends the notes. Writing a 0 over the first newline removes all notes.
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

from .lines import ROWS, Items, block_items, counter_values, is_intact
from .records import Counters

HEAD = struct.Struct("<8s16s9qddqq")  # magic, attempt, counters, clock, tokens, number
ROW = struct.Struct("<9q")  # centiseconds, steps, skipped_steps, skipped_batches, samples, window, tokens, batch, size
MAGIC = b"HelioRo3"
BEGIN = HEAD.size  # of the marks
FIRST_ROW = BEGIN + ROWS
NOTES = FIRST_ROW + ROWS * ROW.size
SIZE = NOTES + 2**16
REGULAR, HAS_ROW = 1, 255  # marks: the first regular one, and the one of a batch with a row
NEWLINE = 10
NO_ROW = BEGIN - 1, FIRST_ROW - ROW.size  # the offsets of the last mark with a row, and of that row
LONGEST = HAS_ROW - REGULAR - 1  # hundredths of a second between regular batches
STEPS, SKIPPED, SAMPLES, TOKENS, BATCH, REGULAR_SIZE = 1, 3, 4, 6, 7, 8  # columns of a row
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
        table: (batches, 8), the columns of `ROW` except the last.
        notes: lines; the recording may contain them, too.
    """

    attempt: str
    number: int
    first: Counters
    clock: float
    table: NDArray[np.int64]
    notes: Sequence[bytes] = ()

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
            *_, batch = part[0].tolist()
            first = replace(first, batch=batch - 1)
            *counters, batch = part[-1].tolist()
            clock = self.clock + counters[0] / 100 - self.first.seconds
            part_losses = None if losses is None else losses[begin:end]
            arrays.append(block_items((self.number, len(arrays)), first, clock, part[:, :BATCH], part_losses))
            first = _counters_after(first, counters, batch)
        return arrays

    @property
    def last(self) -> Counters:
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

    A write to the shared mapping `buffer` reaches the file without a system call. The disk space is allocated first, so
    that a full disk raises OSError here instead of SIGBUS later. If the mapping fails, `buffer` is in memory, and a
    kill loses the batches in it.

    Args:
        path: the file; None for batches in memory only.

    Attributes:
        buffer: the content; the marks begin at `BEGIN`.
        obstacle: why the mapping failed, None if it did not.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.obstacle: OSError | None = None
        self.buffer: mmap.mmap | bytearray = bytearray(SIZE)
        self._last_row, self._next_note = NO_ROW, NOTES
        if path is None:
            return
        try:
            with path.open("w+b") as file:
                _allocate(file.fileno())
                self.buffer = mmap.mmap(file.fileno(), SIZE)
        except OSError as error:
            self.obstacle = error

    def begin(self, attempt: str, number: int, first: Counters, clock: float) -> None:
        self.buffer[HEAD.size - 8 : FIRST_ROW] = bytes(FIRST_ROW - HEAD.size + 8)  # the number and the marks
        self._last_row = NO_ROW
        self.clear_notes()
        counters = counter_values(replace(first, tokens=0))
        HEAD.pack_into(self.buffer, 0, MAGIC, attempt.encode(), *counters, clock, first.tokens, number)

    def add_row(self, at: int, *values: int) -> None:
        last, row = self._last_row
        if at > last:  # otherwise it was interrupted, and is added again
            row += ROW.size
        ROW.pack_into(self.buffer, row, *values)
        self.buffer[at] = HAS_ROW
        self._last_row = at, row

    def add_mark(self, at: int, hundredths: int) -> None:
        self.buffer[at] = REGULAR + hundredths

    def note(self, lines: Sequence[str]) -> bool:
        """Store lines; return False if there is no room or a kill could lose them."""
        text = "\n".join(lines).encode()
        begin, end = self._next_note, self._next_note + 1 + len(text)
        if self.path is None or self.obstacle is not None or end >= SIZE:  # a 0 follows
            return False
        self.buffer[begin + 1 : end + 1] = text + b"\0"  # overwrites cleared notes
        self.buffer[begin] = NEWLINE
        self._next_note = end
        return True

    def clear_notes(self) -> None:
        self.buffer[NOTES] = 0  # one byte, so that they cannot be half cleared
        self._next_note = NOTES

    def rows(self, end: int) -> TailRows:
        _, attempt, *first, clock, tokens, number = HEAD.unpack_from(self.buffer)
        marks, _, _ = bytes(self.buffer[BEGIN:end]).partition(b"\0")
        rows = bytes(self.buffer[FIRST_ROW : FIRST_ROW + marks.count(HAS_ROW) * ROW.size])
        counters = replace(Counters(*first), tokens=tokens)
        return TailRows(attempt.rstrip(b"\0").decode(), number, counters, clock, _table_of(marks, rows))

    def close(self, *, remove: bool = True) -> None:
        """Close the file. If it is not removed, the next writer of the recording adds its batches."""
        if isinstance(self.buffer, mmap.mmap):
            self.buffer.close()
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)


def _table_of(marks: bytes, rows: bytes) -> NDArray[np.int64]:
    mark, row = np.frombuffer(marks, np.uint8), np.frombuffer(rows, "<i8").reshape(-1, ROW.size // 8)
    begins = (mark == HAS_ROW).nonzero()[0]
    counts = [end - begin for begin, end in pairwise([*begins.tolist(), len(mark)])]  # from a row to the next
    columns = row.T.repeat(counts, axis=1)
    later = np.arange(len(mark)) - begins.repeat(counts)
    columns[STEPS] += later
    columns[BATCH] += later
    columns[SAMPLES] += later * columns[REGULAR_SIZE]
    passed = mark - REGULAR
    passed[begins] = 0
    total = passed.cumsum(dtype=np.int64)
    columns[0] += total - total[begins].repeat(counts)
    return columns[:REGULAR_SIZE].T


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


def notes_in(data: bytes) -> bytes:
    return data[NOTES:].partition(b"\0")[0]


def parse_tail(data: bytes) -> TailRows | None:
    """Return the batches and notes of a tail, None if it has none."""
    if not data.startswith(MAGIC) or len(data) < NOTES:  # it is being created
        return None
    _, attempt, *first, clock, tokens, number = HEAD.unpack_from(data)
    if not number:
        return None
    marks, _, _ = data[BEGIN:FIRST_ROW].partition(b"\0")
    notes = notes_in(data).split(b"\n")[1:]
    if not marks and not notes:
        return None
    if marks and marks[0] != HAS_ROW:
        raise ValueError("the tail is damaged")
    table = _table_of(marks, data[FIRST_ROW : FIRST_ROW + marks.count(HAS_ROW) * ROW.size])
    head = [*first, abs(clock), tokens, number]  # a clock may begin slightly below 0
    if not _is_plausible(head, table) or not all(map(is_intact, notes)):
        raise ValueError("the tail is damaged")
    name = attempt.rstrip(b"\0").decode(errors="replace")
    return TailRows(name, number, replace(Counters(*first), tokens=tokens), clock, table, notes)


def _is_plausible(head: Sequence[float], table: NDArray[np.int64]) -> bool:
    increases = np.diff(table[:, [1, 2, 3, 4, TOKENS, BATCH]], axis=0)  # all but the clock and the window
    return all(0 <= value < LIMIT for value in head) and bool(
        (table >= 0).all() and (table < LIMIT).all() and (table[:, BATCH] > 0).all() and (increases >= 0).all()
    )


def _counters_after(first: Counters, counters: list[int], batch: int) -> Counters:
    hundredths, steps, skipped_steps, skipped_batches, samples, _, tokens = counters
    return Counters(
        first.epoch, batch, first.earlier_batches, steps, skipped_steps, skipped_batches, samples,
        first.validations, first.evaluated, hundredths / 100, tokens,
    )  # fmt: skip
