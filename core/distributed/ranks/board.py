"""Rounds of messages between ranks on one machine: a board in shared memory, on which each rank writes its own."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from secrets import token_bytes
from struct import Struct
from time import monotonic, sleep
from typing import Any
from zlib import crc32

from torch.distributed import DistError

from .failure import LateRankError

try:
    import fcntl
except ImportError:  # on Windows; its ranks exchange by gloo
    fcntl = None  # type: ignore[assignment]

HEAD = Struct("<QII")  # the number of a round, the bytes of the message, their checksum
SLOT = 4096  # bytes of a head and a message
SLOTS = 8  # of each rank, for the rounds that not everybody has collected; there are 6 at most
TOKEN = 32  # bytes
MEMORY = Path("/dev/shm")  # noqa: S108  # memory of this machine; another folder may be one that several machines share
SPIN = 50e-6  # seconds of looking without a sleep; not longer, as another rank may need this core
FIRST_SLEEP, LONGEST_SLEEP = 50e-6, 1e-3
LOOK = 0.05  # seconds between two looks whether the others still live


class Board:
    """Every rank writes its messages into slots of its own, and reads those of the others.

    Nothing is assumed of the order in which memory is seen: a message counts when its head has the number of the round
    and its checksum fits. A slot is used again 8 rounds later, when everybody has collected it: who posts round n has
    collected n - 3, as at most 3 are posted and not collected, and the writers of those messages had collected n - 6.

    Each rank holds a lock on a byte of the file, which the kernel takes away when the process ends, however it ends.

    Args:
        file: the descriptor of the board's file, locked for this rank; the board closes it.
        rank: this rank.
        world_size: how many there are.
        timeout: seconds after which a rank is not waited for any longer.

    Attributes:
        capacity: the bytes of a message at most.
        has_failed: returns whether another rank has failed, as far as this one knows; then no rank is waited for.
    """

    capacity = SLOT - HEAD.size

    def __init__(self, file: int, rank: int, world_size: int, timeout: float) -> None:
        self._file, self._rank, self._world_size, self._timeout = file, rank, world_size, timeout
        self.has_failed: Callable[[], bool] = bool
        self._posted, self._collected = 0, 0
        self._own: deque[bytes] = deque()  # messages that were posted and not collected
        self._memory = mmap(file, _size(world_size))
        self._begins = [TOKEN + rank * SLOTS * SLOT for rank in range(world_size)]

    def post(self, message: bytes) -> None:
        """Post this rank's message of the next round, without a wait."""
        self._own.append(message)
        assert len(self._own) <= 3
        self._posted = number = self._posted + 1
        slot = HEAD.pack(number, len(message), crc32(message, number)) + message
        begin = self._begins[self._rank] + number % SLOTS * SLOT
        self._memory[begin : begin + len(slot)] = slot

    def ready(self) -> list[bytes] | None:
        """Return the messages of the oldest round that is not collected, by rank; None where one is missing yet."""
        number, memory, found = self._collected + 1, self._memory, []
        place = number % SLOTS * SLOT
        for rank, begin in enumerate(self._begins):
            if rank == self._rank:
                found.append(self._own[0])
                continue
            begin += place
            written, length, checksum = HEAD.unpack_from(memory, begin)
            if written != number or length > self.capacity:
                return None
            message = memory[begin + HEAD.size : begin + HEAD.size + length]
            if crc32(message, number) != checksum:  # it is being written
                return None
            found.append(message)
        self._collected = number
        self._own.popleft()
        return found

    def collect(self) -> list[bytes]:
        """Return the messages of the oldest round that is not collected, by rank.

        Raises:
            DistError: a rank has left or died; LateRankError, where it did not come in time.
        """
        now, waited, looked, pause = monotonic(), 0.0, 0.0, FIRST_SLEEP
        while (found := self.ready()) is None:
            before, now = now, monotonic()
            waited += min(now - before, LOOK)  # while this process was stopped (SIGSTOP), it has not waited
            if waited < SPIN:  # without a yield: where others wait for the core, it comes back late
                continue
            sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)
            if waited - looked > LOOK:
                looked = waited
                if (gone := self._gone()) or self.has_failed():
                    if (found := self.ready()) is not None:  # posted just before
                        break
                    raise DistError("The board: " + (f"rank {gone[0]} is gone." if gone else "a rank has failed."))
            if waited > self._timeout:
                raise LateRankError(f"The board: timed out after {self._timeout:g} s of waiting for another rank.")
        return found

    def close(self) -> None:
        """Leave the board."""
        self._memory.close()
        os.close(self._file)

    def _gone(self) -> list[int]:
        """Return the ranks that hold their locks no more."""
        gone = []
        for rank in range(self._world_size):
            if rank != self._rank:
                with suppress(OSError):  # it is held
                    fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
                    gone.append(rank)
        return gone


def open_board(
    rank: int, world_size: int, timeout: float, broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]
) -> Board | None:
    """Return a board if all ranks can read what rank 0 has written into its file, else None. A collective.

    Nobody sees the file afterwards: it ends with the processes that have it open.

    Args:
        rank: this rank.
        world_size: how many there are.
        timeout: as `Board`.
        broadcast: returns a value of rank 0 on all ranks.
        gather: returns the values of all ranks.
    """
    token, own, path = token_bytes(TOKEN), None, None
    with suppress(OSError):  # no room, or nowhere to write
        if rank == 0 and fcntl is not None:
            own, path = _made(world_size, token)
    made, board = path, None
    try:
        path, token = broadcast((path, token))
        if rank and path is not None and fcntl is not None:
            own = _opened(path, token)
        is_held = own is not None and _locked(own, rank)
        if all(gather(is_held)) and own is not None:
            board = Board(own, rank, world_size, timeout)
    finally:
        if made is not None:
            Path(made).unlink()
        if own is not None and board is None:
            os.close(own)
    return board


def _made(world_size: int, token: bytes) -> tuple[int, str]:
    """Make the file, which only this user can open; written in full, as a hole in a full disk would end the process."""
    own, path = tempfile.mkstemp(prefix="heliograph-", dir=MEMORY)
    try:
        with open(own, "wb", closefd=False) as file:  # a descriptor
            file.write(token + bytes(_size(world_size) - TOKEN))
    except OSError:
        os.close(own)
        Path(path).unlink()
        raise
    return own, path


def _opened(path: str, token: bytes) -> int | None:
    """Open the file if it is the one that rank 0 has made, and not another machine's or container's."""
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.read(own, TOKEN) == token:
        return own
    os.close(own)
    return None


def _locked(own: int, rank: int) -> bool:
    """Lock this rank's byte; return whether the file system can do that."""
    try:
        fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    return True


def _size(world_size: int) -> int:
    return TOKEN + SLOTS * SLOT * world_size
