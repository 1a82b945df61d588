"""The last few thousand batches of a rank, in a file that the system keeps however the process ends.

A fixed head says whose they are. A row ends with the batch's own number, which is written last: a kill in the middle of
a row leaves another number there, and so a row that is not whole.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, Self

HEAD = struct.Struct("<8s q 16s 16s 3q")  # magic, version, and the owner
ROW = struct.Struct("<4q d 2q")
MAGIC, VERSION = b"HelioStp", 1
BEGIN, ROWS = 128, 4096
SIZE = BEGIN + ROWS * ROW.size
OFFSETS = tuple(BEGIN + slot * ROW.size for slot in range(ROWS))  # of the batches, by their number % ROWS
MASK = ROWS - 1


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose batches they are.

    Attributes:
        training: 16 bytes that no other training has.
        layout: 16 bytes of how samples are dealt out in batches: in another layout a number means another batch.
        rank: the process.
        world_size: how many there are.
        returns: how often the run had gone back to a saved state: what it did before the last time is another path.
    """

    training: bytes
    layout: bytes
    rank: int = 0
    world_size: int = 1
    returns: int = 0


class Row(NamedTuple):
    """One batch.

    Attributes:
        number: in the run, from 1.
        batch: in the epoch, from 1.
        steps: optimizer steps when it was done.
        samples: samples trained on by then.
        loss: of several, the first one's; 0 where it was left out.
        others: a digest of the other losses; 0 without.
        end: the number again, negative where the batch was left out.
    """

    number: int
    batch: int
    steps: int
    samples: int
    loss: float
    others: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it was written to its end."""
        return self.number > 0 and abs(self.end) == self.number

    @property
    def is_left_out(self) -> bool:
        """Whether the batch was skipped."""
        return self.end < 0

    @property
    def bits(self) -> bytes:
        """What two rows are compared by: NaN equals NaN of the same bits."""
        return ROW.pack(*self)


class Ring:
    """The file. Its room is taken beforehand, so that a full disk is an OSError here and not a signal later.

    Args:
        file: open for reading and writing, `SIZE` bytes long.
        path: where it lies.

    Attributes:
        buffer: the file's content; a row is packed at `OFFSETS[number & MASK]`.
    """

    def __init__(self, file: int, path: Path) -> None:
        self.path = path
        try:
            _take_room(file)
            self.buffer = mmap.mmap(file, SIZE)
        finally:
            os.close(file)  # a mapping keeps it

    @classmethod
    def new(cls, path: Path, owner: Owner) -> Self:
        """Replace a regular file by a new one.

        Raises:
            OSError: something else has the name, there is no room, or the file system maps no files.
        """
        _check_regular(path)
        path.unlink(missing_ok=True)
        ring = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), path)
        ring.sign(owner)
        return ring

    @classmethod
    def found(cls, path: Path, training: bytes) -> tuple[Self, Owner] | None:
        """Open the file that a run of a training left, and say whose it is; None where there is none to be believed.

        Raises:
            OSError: it cannot be read.
        """
        try:
            _check_regular(path)
            flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            file = os.open(path, flags)
        except FileNotFoundError:
            return None
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != SIZE or status.st_nlink != 1:
            os.close(file)
            return None
        ring = cls(file, path)
        magic, version, *facts = HEAD.unpack_from(ring.buffer)
        owner = Owner(*facts)
        if (magic, version, owner.training) != (MAGIC, VERSION, training):
            ring.close()
            return None
        return ring, owner

    def sign(self, owner: Owner) -> None:
        """Say whose batches these are."""
        HEAD.pack_into(self.buffer, 0, MAGIC, VERSION, *astuple(owner))

    def rows(self) -> list[Row]:
        """Return the rows that are whole and in their place, in the order of the run."""
        rows = map(Row._make, ROW.iter_unpack(self.buffer[BEGIN:]))
        whole = (row for slot, row in enumerate(rows) if row.is_whole and row.number & MASK == slot)
        return sorted(whole, key=lambda row: row.number)

    def write(self, row: Row) -> None:
        """Put a row in its place."""
        ROW.pack_into(self.buffer, OFFSETS[row.number & MASK], *row)

    def drop(self, position: int) -> None:
        """Take out the rows of the batches later than a position."""
        for row in self.rows():
            if row.number > position:
                at = OFFSETS[row.number & MASK]
                self.buffer[at : at + ROW.size] = bytes(ROW.size)

    def close(self) -> None:
        """Let go of the file; the system writes it."""
        self.buffer.close()


def _check_regular(path: Path) -> None:
    """Raise OSError where something that is not a regular file has a name: it is left alone."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EEXIST, "not a regular file", str(path))


def _take_room(file: int) -> None:
    """Make a file `SIZE` bytes long, with room for them on the disk.

    Raises:
        OSError: there is none.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, SIZE)
    elif os.fstat(file).st_size < SIZE and os.write(file, bytes(SIZE)) < SIZE:  # macOS, say
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
