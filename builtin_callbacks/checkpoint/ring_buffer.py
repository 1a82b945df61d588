"""The last few thousand batches of a rank: a row for each, in a file that the system keeps however the process ends.

A fixed head says whose they are. A row ends with the batch's own number, which is written last: a kill in the middle of
a row leaves another number there, and so a row that is not whole.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...events import BatchEnd, Run

HEAD = struct.Struct("<8s q 16s 16s 3q")  # magic, version, and the owner
ROW = struct.Struct("<4q d 2q")
MAGIC, VERSION = b"HelioStp", 1
BEGIN, ROWS = 128, 4096
SIZE = BEGIN + ROWS * ROW.size
OFFSETS = tuple(BEGIN + slot * ROW.size for slot in range(ROWS))  # of the batches, by their number % ROWS
MASK = ROWS - 1
Counters = tuple[int, int, int, int]
CHUNK = 32  # batches: as many of the last ones a kill may lose
LOOK_EVERY = 8  # batches
CLOSES = getattr(os, "O_CLOEXEC", 0)  # Windows has no such flag, and closes files in children anyway


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
            if hasattr(os, "posix_fallocate"):  # else a full disk would end the process at a write
                os.posix_fallocate(file, 0, SIZE)
            elif os.fstat(file).st_size < SIZE and os.write(file, bytes(SIZE)) < SIZE:  # macOS, say
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
        ring = cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOSES, 0o666), path)
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
            flags = os.O_RDWR | CLOSES | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
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


class Rows:
    """Makes the rows of a run: at once where losses are on the CPU, else as soon as the device has them.

    Args:
        waiting: what reads losses from a device.
    """

    def __init__(self, waiting: WaitingLosses | None = None) -> None:
        self._waiting = waiting or WaitingLosses()

    def of(self, run: Run) -> Iterator[Row]:
        """Yield the row of the batch that is done, or those of earlier ones whose losses have arrived.

        There is none where the loop was not given the loss.
        """
        progress, is_left_out = run.progress, run.control.skips_batch
        counters = progress.batches, progress.batch, progress.steps, progress.samples
        losses = () if is_left_out else run.stepping.batch_losses
        if not losses and not is_left_out:
            return
        if self._reads_at_once(losses):
            yield _row(counters, [loss.item() for loss in losses])
            return
        copies = [copied(loss, losses[0].device) for loss in losses]
        for batch, values in self._waiting.add(Batch(counters, copies)):
            yield _row(batch.counters, values)

    def late(self, *, wait: bool = False) -> Iterator[Row]:
        """Yield the rows that a device had kept: those that are there, or all of them."""
        self._waiting.send()
        for batch, values in self._waiting.arrived(wait=wait):
            yield _row(batch.counters, values)

    def forget(self) -> None:
        """Drop what a device has kept."""
        self._waiting.clear()

    def _reads_at_once(self, losses: Sequence[Tensor]) -> bool:
        """Return whether nothing has to be waited for; what was left out comes after those before it."""
        return all(loss.is_cpu for loss in losses) if losses else self._waiting.is_empty


def quick_writer(run: Run, ring: Ring) -> Callable[..., None]:
    """Return a handler of `BatchEnd` that writes the row of a batch with a single loss on the CPU, and does no more."""
    progress, control, buffer, pack = run.progress, run.control, ring.buffer, ROW.pack_into

    def write(run: Run, event: BatchEnd) -> None:  # noqa: ARG001  # a handler's signature
        number = progress.earlier_batches + (batch := progress.batch)
        if control.skips_batch:
            ring.write(_row((number, batch, progress.steps, progress.samples), ()))
        elif (loss := run.loss) is not None:  # as it is where a train_function keeps it to itself
            at = OFFSETS[number & MASK]
            pack(buffer, at, number, batch, progress.steps, progress.samples, loss.item(), 0, number)

    return write


def is_plain(run: Run) -> bool:
    """Return whether a run's batches have a single loss, which is on the CPU."""
    return len(run.optimizers) == 1 and run.loss is not None and run.loss.is_cpu


def _row(counters: Counters, values: Sequence[float]) -> Row:
    """Return a row; one without losses is of a batch that was left out."""
    number, *_ = counters
    if not values:
        return Row(*counters, loss=0.0, others=0, end=-number)
    others = blake2b(struct.pack(f"<{len(values)}d", *values), digest_size=8).digest() if values[1:] else bytes(8)
    return Row(*counters, loss=values[0], others=int.from_bytes(others, "little", signed=True), end=number)


class Arrival(Protocol):
    """When a copy is on the host; `torch.Event` is one."""

    def query(self) -> bool:
        """Return whether it is there."""

    def synchronize(self) -> object:
        """Wait for it."""


Fetch = Callable[[Tensor], tuple[Tensor, Arrival]]


class Batch(NamedTuple):
    """A batch whose losses are still on the device.

    Attributes:
        counters: number, batch, steps and samples, as in a row.
        losses: copies without a graph; none where the batch was left out.
    """

    counters: tuple[int, int, int, int]
    losses: Sequence[Tensor]


class WaitingLosses:
    """Batches whose losses are on their way to the host, in the order of the run.

    Args:
        fetch: begins to copy a tensor to the host; returns the copy, and what says when it is there.
    """

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._fetch = fetch or start_fetch
        self._open: list[Batch] = []
        self._fetching: deque[tuple[list[Batch], Tensor | None, Arrival | None]] = deque()
        self._added = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waited for."""
        return not self._open and not self._fetching

    def add(self, batch: Batch) -> Iterator[tuple[Batch, list[float]]]:
        """Take a batch in; yield those whose losses have arrived meanwhile."""
        self._open.append(batch)
        self._added += 1
        if len(self._open) == CHUNK:
            self.send()
        return self.arrived() if self._added % LOOK_EVERY == 0 else iter(())

    def send(self) -> None:
        """Begin to copy what is there."""
        batches, self._open = self._open, []
        losses = [loss for batch in batches for loss in batch.losses]
        if losses:
            self._fetching.append((batches, *self._fetch(torch.stack(losses))))
        elif batches:
            self._fetching.append((batches, None, None))

    def arrived(self, *, wait: bool = False) -> Iterator[tuple[Batch, list[float]]]:
        """Yield the batches whose losses are on the host by now, with their values; or wait for those under way."""
        while self._fetching:
            batches, host, arrival = self._fetching[0]
            if arrival is not None and wait:
                arrival.synchronize()
            elif arrival is not None and not arrival.query():
                return
            self._fetching.popleft()
            values = iter([] if host is None else host.double().tolist())
            for batch in batches:
                yield batch, [next(values) for _ in batch.losses]

    def clear(self) -> None:
        """Forget them all."""
        self._open.clear()
        self._fetching.clear()


def start_fetch(losses: Tensor) -> tuple[Tensor, Arrival]:
    """Begin to copy losses to the host."""
    host = torch.empty(losses.shape, dtype=losses.dtype, pin_memory=True)
    host.copy_(losses, non_blocking=True)
    event = torch.Event(device=losses.device)
    event.record()
    return host, event


def copied(loss: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a loss without its graph, not waited for; a graph on a GPU may reuse the loss's own memory."""
    return loss.detach().clone().reshape(()).to(device, non_blocking=True)
