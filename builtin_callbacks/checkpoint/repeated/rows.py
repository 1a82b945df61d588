"""The row of a batch, from what the run has when the batch is done."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

from .pending_losses import Batch, WaitingLosses, copied
from .ring_buffer import MASK, OFFSETS, ROW, Ring, Row

if TYPE_CHECKING:
    from ....events import BatchEnd, Run

Counters = tuple[int, int, int, int]


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
        losses = () if is_left_out else run.batch_losses
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
