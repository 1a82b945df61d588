"""Batches in a list or tuple: dealt out in turn to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from ..batch import batch_size
from ..order.shares import ALONE, Share
from .stateless import Reading, Stateless


class SequenceSource(Stateless):
    """A list or tuple of batches, dealt out in turn to the ranks.

    Args:
        loader: the batches.
        share: the part of this process.
        fills_up: whether all ranks read equally many, some of the first ones again; else each batch is read once.
    """

    as_it_is, common = False, True
    batch_size: int | None = 1

    def __init__(self, loader: Sequence[Any], share: Share = ALONE, *, fills_up: bool = True) -> None:
        super().__init__(loader, {"source": "sequence", "batches": len(loader)}, share)
        if share.ranks > 1:
            from ..order.batch_samplers import full_batches

            rounds = full_batches(len(loader), share.ranks, drop_last=False)
            self._end = rounds * share.ranks if fills_up else len(loader)
            self.length = len(range(share.rank, self._end, share.world_size))
            self.even = self._end == len(loader) and len(set(map(batch_size, loader))) == 1

    def open(self, reading: Reading) -> Iterator[Any]:
        """Begin at the position."""
        if self.share.ranks == 1:
            return islice(self.loader, reading.batch, None) if reading.batch else iter(self.loader)
        first, apart_by = reading.batch * self.share.world_size + self.share.rank, self.share.world_size
        return (self.loader[number % len(self.loader)] for number in range(first, self._end, apart_by))
