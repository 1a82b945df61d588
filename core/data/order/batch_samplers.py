"""Batch samplers of keyed batches: where each batch of an epoch lies, from any position on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

from ..draws.keyed import KeyedBatch, KeyedIndex, Place, keyed_batch
from .samplers import DistributedSampler, SeekableSampler, algorithm_of, seed_of


@runtime_checkable
class Order(Protocol):
    """What stands in for the batch sampler of a loader.

    Attributes:
        draws: whether its iteration runs code that may draw random numbers.
        unknown: the sampler of which nobody knows whether it repeats itself, None where that is known.
        kind: plain facts that a checkpoint keeps: with others, a position amid an epoch would mean other samples.
        batch_size: how many indices of the sampler a batch takes; 1 where it yields whole batches.
        length: how many batches an epoch has here, None where nobody knows.
        even: whether the batches of all ranks are as large as this one's.
        common: whether what ranks read are parts of one order, each of them every so many of its samples.
    """

    draws: bool
    unknown: Any
    kind: dict[str, Any]
    batch_size: int
    length: int | None
    even: bool
    common: bool

    def begin(self, seed: int, epoch: int, batch: int) -> None:
        """Set what the next iteration yields."""

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        """Yield the batches from there on."""


class Begun:
    """Where the next iteration begins, on one rank of several."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.seed = self.epoch = self.batch = 0

    def begin(self, seed: int, epoch: int, batch: int) -> None:
        """Set seed, epoch and the first batch."""
        self.seed, self.epoch, self.batch = seed, epoch, batch

    def place(self, batch: int, batch_size: int) -> Place:
        """Return the place of a batch on this rank."""
        first = batch * batch_size * self.world_size + self.rank
        return Place((self.seed, self.epoch, batch, self.rank), first, self.world_size)


class SeekableOrder(Begun):
    """Batches of a seekable sampler: going to any position costs the same."""

    draws, unknown, even, common = False, None, True, True

    def __init__(
        self, sampler: SeekableSampler, batch_size: int, *, drop_last: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(rank, world_size)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.length: int | None = full_batches(len(sampler), batch_size, drop_last=drop_last)
        self.kind = {**_order_facts(sampler), "drop_last": drop_last}

    def __iter__(self) -> Iterator[KeyedBatch]:
        size = self.batch_size
        start = min(self.batch * size, len(self.sampler))  # the last batch may be smaller
        indices = self.sampler.indices(self.seed, self.epoch, start)
        for batch in count(self.batch):
            chosen = list(islice(indices, size))
            if not chosen or (self.drop_last and len(chosen) < size):
                return
            yield keyed_batch(chosen, self.place(batch, size))


class SingleOrder(Begun):
    """Indices of a seekable sampler, for a loader without automatic batching."""

    draws, unknown, even, common = False, None, False, True
    batch_size = 1

    def __init__(self, sampler: SeekableSampler, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self.sampler = sampler
        self.length: int | None = len(sampler)
        self.kind = _order_facts(sampler)

    def __iter__(self) -> Iterator[KeyedIndex]:
        for batch, index in enumerate(self.sampler.indices(self.seed, self.epoch, self.batch), self.batch):
            yield KeyedIndex(index, self.place(batch, 1))


def full_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many batches there are of so many samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _order_facts(sampler: SeekableSampler) -> dict[str, Any]:
    """Return what is known of a seekable sampler, without the part of a rank in it."""
    whole = sampler
    while isinstance(whole, DistributedSampler):
        whole = whole.sampler
    return {"order": algorithm_of(sampler), "seed": seed_of(sampler), "samples": len(whole)}
