"""Orders that are divided among the ranks: each rank reads its part of a common order.

In a training every rank has the same number of batches: the last round is filled up from the start of the order, or
dropped if the loader drops its last batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from . import samplers
from .keyed import BEGIN, KeyedBatch, KeyedGenerators, KeyedPosition, keyed_batch
from .sizes import ALONE, Share, length_of
from .users_code import is_by_user


class Order:
    """Replaces the batch sampler of a loader, on one rank. A loader without automatic batching reads batches of one.

    Attributes:
        is_own: whether iterating runs only code of this package.
        unknown: a sampler with unknown determinism, or None.
        kind: plain facts for the checkpoint: if they differ, a position within an epoch means other samples.
        batch_size: sampler indices per batch; 1 if the sampler yields complete batches.
        length: batches of an epoch on this rank, None if unknown.
        even: whether the batches of all ranks have the same sizes.
        common: whether the ranks read parts of one order, each every n-th sample.
    """

    is_own = False
    unknown: Any = None
    kind: dict[str, Any]
    batch_size: int
    length: int | None
    even: bool
    common: bool

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.seed = self.epoch = self.batch = 0

    def begin(self, seed: int, epoch: int, batch: int) -> None:
        # Sets the start of the next iteration.
        self.seed, self.epoch, self.batch = seed, epoch, batch

    def __iter__(self) -> Iterator[KeyedBatch]:
        """Yield the remaining batches of the epoch."""
        raise NotImplementedError


class SeekableOrder(Order):
    """Batches of a seekable sampler: seeking has a constant cost."""

    even = common = True

    def __init__(
        self, sampler: samplers.SeekableSampler, batch_size: int, *, drop_last: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(rank, world_size)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.length = full_batches(len(sampler), batch_size, drop_last=drop_last)
        inner = sampler
        while isinstance(inner, samplers.DistributedSampler):  # the facts are without the part of a rank
            inner = inner.sampler
        self.is_own = type(inner) in (samplers.RandomSampler, samplers.SequentialSampler)
        facts = {"order": samplers.algorithm_of(sampler), "seed": samplers.seed_of(sampler), "samples": len(inner)}
        self.kind = {**facts, "drop_last": drop_last}

    def __iter__(self) -> Iterator[KeyedBatch]:
        size, ranks = self.batch_size, self.world_size
        start = min(self.batch * size, len(self.sampler))  # the last batch may be smaller
        indices = self.sampler.indices(self.seed, self.epoch, start)
        for batch in count(self.batch):
            chosen = KeyedBatch(islice(indices, size))
            if not chosen or (self.drop_last and len(chosen) < size):
                return
            key = (self.seed, self.epoch, batch, self.rank)
            chosen.position = KeyedPosition(key, batch * size * ranks + self.rank, ranks)
            yield chosen


def full_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)


BLOCK = 256  # indices under one key: larger blocks cost less, but read further ahead
Part = tuple[Any, int, int]  # the indices of a rank in a round, the position of the first sample, and the stride
AHEAD = -2  # a sampler draws under its own keys, below the keys of the batches


class OpaqueSampler(Order):
    """Runs any other sampler or batch sampler, under its own keys.

    To reach a position, indices are skipped; no data is loaded.
    """

    def __init__(self, inner: Any, share: Share) -> None:
        super().__init__(share.rank, share.world_size)
        self.inner = inner
        self.unknown = _unknown(inner)
        self.generators = KeyedGenerators(inner)
        self.kind = _facts(inner)

    def iterate_keyed(self, inner: Iterable[Any], block: int = 1) -> Iterator[Any]:
        # Requests `block` indices at a time, each block under its own key.
        self.generators.seed(self.seed, self.epoch, BEGIN)
        chosen = iter(inner)
        for number in count():
            self.generators.seed(self.seed, self.epoch, AHEAD - number)
            indices = list(islice(chosen, block))
            yield from indices
            if len(indices) < block:
                return

    def rounds(self) -> Iterator[Part]:
        """Yield the batches of this rank from the start of the epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[KeyedBatch]:
        for batch, (indices, first, stride) in enumerate(self.rounds()):
            if batch >= self.batch:
                yield keyed_batch(indices, KeyedPosition((self.seed, self.epoch, batch, self.rank), first, stride))


class OpaqueOrder(OpaqueSampler):
    """The order of a distributed sampler or batch sampler."""

    def __init__(self, inner: Any, share: Share, *, batched: bool) -> None:
        super().__init__(inner, share)
        self.batched, self.length = batched, length_of(inner)
        plain = type(inner) is BatchSampler
        self.batch_size = inner.batch_size if plain else 1
        self.even = self.common = plain and isinstance(inner.sampler, TorchDistributedSampler)

    def rounds(self) -> Iterator[Part]:
        samples = 0
        for chosen in self.iterate_keyed(self.inner):
            indices = chosen if self.batched else [chosen]
            yield indices, samples * self.world_size + self.rank, self.world_size
            samples += len(indices)  # batches may have any size


def knows_ranks(sampler: Any) -> bool:
    # True if the sampler, or a sampler that it wraps, divides its indices among the ranks.
    while sampler is not None:
        if hasattr(sampler, "num_replicas") or (hasattr(sampler, "rank") and hasattr(sampler, "world_size")):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def _facts(sampler: Any) -> dict[str, Any]:
    # Without the part of a rank.
    if type(sampler) is BatchSampler:
        return {**_facts(sampler.sampler), "drop_last": sampler.drop_last}
    facts: dict[str, Any] = {"order": type(sampler).__name__, "seed": samplers.seed_of(sampler)}
    if knows_ranks(sampler):
        return {**facts, "samples": length_of(getattr(sampler, "dataset", None))}
    return {**facts, "length": length_of(sampler)}


def _unknown(sampler: Any) -> Any:
    """Return the sampler if it is of a library: its state is not verified.

    A resume compares the attributes of a user's sampler; torch's samplers have only generators, which are keyed.
    """
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    is_torchs = type(inner).__module__.startswith("torch.utils.data")
    return None if is_torchs or is_by_user(type(inner)) or samplers.is_seekable(inner) else inner


def filled_rounds(items: Iterator[Any], size: int, ranks: int, *, drop_last: bool) -> Iterator[list[Any]]:
    # Lists of `size` items; the last one is filled up from the beginning to a multiple of the ranks, or dropped.
    beginning = chosen = list(islice(items, size))
    while len(chosen) == size or (chosen and not drop_last):
        yield [*chosen, *islice(cycle(beginning), -len(chosen) % ranks)]
        chosen = list(islice(items, size))


class DealtSamples(OpaqueSampler):
    """The samples of a user's sampler: dealt to the ranks in turn, then batched.

    Every rank runs all of the sampler, under the same keys, and takes its part. So the order of the samples is the same
    for any number of ranks.

    Args:
        batches: the batch size and the sampler.
        share: the part of this process.
    """

    even = common = True

    def __init__(self, batches: BatchSampler, share: Share) -> None:
        super().__init__(batches, share)
        self.batch_size, self._drop_last = batches.batch_size, batches.drop_last
        samples, drop_last = length_of(batches.sampler), batches.drop_last
        rank_samples = None if samples is None else full_batches(samples, share.world_size, drop_last=drop_last)
        self.length = None if rank_samples is None else full_batches(rank_samples, self.batch_size, drop_last=drop_last)

    def rounds(self) -> Iterator[Part]:
        ranks, size = self.world_size, self.batch_size * self.world_size
        indices = self.iterate_keyed(self.inner.sampler, BLOCK)
        for number, filled in enumerate(filled_rounds(indices, size, ranks, drop_last=self._drop_last)):
            yield filled[self.rank :: ranks], number * size + self.rank, ranks


class DealtBatches(OpaqueSampler):
    """The batches of a user's batch sampler, or of a sampler whose indices are batches, dealt to the ranks in turn.

    Args:
        inner: yields batches of indices, or single indices.
        share: the part of this process.
        batched: whether it yields batches.
    """

    even, common = False, True
    batch_size = 1

    def __init__(self, inner: Any, share: Share, *, batched: bool) -> None:
        super().__init__(inner, share)
        self.batched, self._drop_last = batched, bool(getattr(inner, "drop_last", False))
        if samplers.is_seekable(inner):
            self.kind["order"] = samplers.algorithm_of(inner)
        batches = length_of(inner)
        self.length = None if batches is None else full_batches(batches, share.world_size, drop_last=self._drop_last)

    def rounds(self) -> Iterator[Part]:
        ranks, position = self.world_size, 0
        for batches in filled_rounds(self._indices(), ranks, ranks, drop_last=self._drop_last):
            starts = [position + sum(map(len, batches[:rank])) for rank in range(ranks + 1)]
            yield batches[self.rank], starts[self.rank], 1
            position = starts[-1]

    def _indices(self) -> Iterator[Any]:
        # All of an epoch: positions count samples, so the batches before a position are counted, not loaded.
        seeks = samplers.is_seekable(self.inner)
        chosen = self.inner.indices(self.seed, self.epoch, 0) if seeks else self.iterate_keyed(self.inner)
        return iter(chosen) if self.batched else ([index] for index in chosen)


class EveryNth(Order):
    """Every n-th batch of the order of one process: nothing is filled up and nothing dropped.

    Args:
        order: of one process.
        rank: the first batch.
        world_size: the distance to the next batch.
    """

    even = False

    def __init__(self, order: Order, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._order, self.is_own, self.unknown, self.kind = order, order.is_own, order.unknown, order.kind
        self.batch_size, self.common = order.batch_size, order.common
        self.length = None if order.length is None else len(range(rank, order.length, world_size))

    def __iter__(self) -> Iterator[KeyedBatch]:
        self._order.begin(self.seed, self.epoch, 0)
        return islice(self._order, self.batch * self.world_size + self.rank, None, self.world_size)


def order_of(loader: DataLoader[Any], share: Share = ALONE) -> Order:
    # The part of one process. A distributed sampler is not divided again.
    batch_sampler: Any = loader.batch_sampler
    plain = type(batch_sampler) is BatchSampler
    indices = loader.sampler if batch_sampler is None else batch_sampler.sampler if plain else None
    sampler = None if indices is None else seekable(indices)
    if sampler is not None:
        size, drop_last = (batch_sampler.batch_size, batch_sampler.drop_last) if plain else (None, False)
        return _seekable_order(sampler, size, drop_last=drop_last, share=share)
    inner = loader.sampler if batch_sampler is None else batch_sampler
    if knows_ranks(inner):
        return OpaqueOrder(inner, share, batched=batch_sampler is not None)
    if plain:
        return DealtSamples(batch_sampler, share)
    return DealtBatches(inner, share, batched=batch_sampler is not None)


def _seekable_order(sampler: samplers.SeekableSampler, size: int | None, *, drop_last: bool, share: Share) -> Order:
    rank, world_size = share.rank, share.world_size
    if world_size > 1 and not knows_ranks(sampler):
        sampler = samplers.DistributedSampler(sampler, rank, world_size, drop_last=drop_last)
    order = SeekableOrder(sampler, size or 1, drop_last=drop_last, rank=rank, world_size=world_size)
    order.even = size is not None  # otherwise the samples are complete batches of any size
    if not isinstance(sampler, samplers.DistributedSampler) and world_size > 1:  # its division is unknown
        order.even = order.common = False
    return order


def seekable(sampler: Sampler[Any] | Iterable[Any]) -> samplers.SeekableSampler | None:
    """Return the seekable equivalent of a sampler, None if there is none.

    torch's shuffle without replacement becomes ours, with another permutation; the seed of its generator is used.
    """
    if samplers.is_seekable(sampler):
        return sampler
    if type(sampler) is TorchSequentialSampler:
        return samplers.SequentialSampler(len(sampler))
    if type(sampler) is TorchRandomSampler and not sampler.replacement and sampler._num_samples is None:
        generator = sampler.generator
        return samplers.RandomSampler(len(sampler), seed=None if generator is None else generator.initial_seed())
    return None
