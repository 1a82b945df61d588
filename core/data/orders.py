"""Batch samplers of keyed batches: where each batch of an epoch lies, from any position on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from ..batches import length_of
from .keyed import BEGIN, Held, KeyedBatch, KeyedIndex, Place, keyed_batch
from .samplers import RandomSampler, SeekableSampler, SequentialSampler, algorithm_of, is_seekable, seed_of

AHEAD = -2  # a sampler that draws does so under keys of its own, below those of the batches


@runtime_checkable
class Order(Protocol):
    """What stands in for the batch sampler of a loader.

    Attributes:
        draws: whether its iteration runs code that may draw random numbers.
        unknown: the sampler of which nobody knows whether it repeats itself, None where that is known.
        kind: plain facts that a checkpoint keeps: with others, a position amid an epoch would mean other samples.
    """

    draws: bool
    unknown: Any
    kind: dict[str, Any]

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

    draws, unknown = False, None

    def __init__(
        self, sampler: SeekableSampler, batch_size: int, *, drop_last: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(rank, world_size)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.kind = {
            "order": algorithm_of(sampler),
            "seed": seed_of(sampler),
            "samples": len(sampler),
            "batch_size": batch_size,
            "drop_last": drop_last,
        }

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

    draws, unknown = False, None

    def __init__(self, sampler: SeekableSampler, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self.sampler = sampler
        order = {"order": algorithm_of(sampler), "seed": seed_of(sampler)}
        self.kind = {**order, "samples": len(sampler), "batch_size": None}

    def __iter__(self) -> Iterator[KeyedIndex]:
        for batch, index in enumerate(self.sampler.indices(self.seed, self.epoch, self.batch), self.batch):
            yield KeyedIndex(index, self.place(batch, 1))


class ForeignOrder(Begun):
    """Any other sampler or batch sampler: run under keys of its own, and passed over up to the position.

    Passing over costs its indices only, no data is loaded.
    """

    draws = True

    def __init__(self, inner: Iterable[Any], *, batched: bool, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self.inner, self.batched = inner, batched
        self.unknown = _unknown(inner)
        self.held = Held(inner)
        self.kind = _facts(inner)

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        seed, epoch, first = self.seed, self.epoch, self.batch
        self.held.seed(seed, epoch, BEGIN)
        chosen, samples = iter(self.inner), 0
        for batch in count():
            self.held.seed(seed, epoch, AHEAD - batch)
            try:
                indices = next(chosen)
            except StopIteration:
                return
            before, samples = samples, samples + (len(indices) if self.batched else 1)  # batches may be of any sizes
            if batch < first:
                continue
            place = Place((seed, epoch, batch, self.rank), before * self.world_size + self.rank, self.world_size)
            yield keyed_batch(indices, place) if self.batched else KeyedIndex(indices, place)


def _facts(sampler: Iterable[Any]) -> dict[str, Any]:
    """Return what is known of a foreign sampler or batch sampler."""
    facts: dict[str, Any] = {"order": type(sampler).__name__, "length": length_of(sampler), "seed": seed_of(sampler)}
    if type(sampler) is BatchSampler:
        facts |= {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, "of": _facts(sampler.sampler)}
    return facts


def _unknown(sampler: Any) -> Any:
    """Return a sampler, or the one in it, that may have a state which no key reaches: any that is not torch's own."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return None if type(inner).__module__.startswith("torch.utils.data") or is_seekable(inner) else inner


def order_of(loader: DataLoader[Any], rank: int, world_size: int) -> Order:
    """Return the order that a map-style loader means."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        known = seekable(loader.sampler)
        if known is None:
            return ForeignOrder(loader.sampler, batched=False, rank=rank, world_size=world_size)
        return SingleOrder(known, rank, world_size)
    known = seekable(batch_sampler.sampler) if type(batch_sampler) is BatchSampler else None
    if known is None or not isinstance(batch_sampler, BatchSampler):
        return ForeignOrder(batch_sampler, batched=True, rank=rank, world_size=world_size)
    size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    return SeekableOrder(known, size, drop_last=drop_last, rank=rank, world_size=world_size)


def seekable(sampler: Sampler[Any] | Iterable[Any]) -> SeekableSampler | None:
    """Return a seekable sampler that does what another means, or None where nobody can know that.

    torch's shuffle without replacement is one of ours with another permutation; a generator that it was given still
    says which.
    """
    if is_seekable(sampler):
        return sampler
    if type(sampler) is TorchSequentialSampler:
        return SequentialSampler(len(sampler))
    if type(sampler) is TorchRandomSampler and not sampler.replacement and sampler._num_samples is None:
        generator = sampler.generator
        return RandomSampler(len(sampler), seed=None if generator is None else generator.initial_seed())
    return None
