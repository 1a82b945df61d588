"""Orders dealt out to ranks: each reads its part of the one that all have in common.

In a training every rank has equally many batches: the last round is filled up from the beginning of the order, or left
out where the loader drops its last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, cycle, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from ..draws.keyed import KeyedBatch, KeyedIndex, KeyedPosition, keyed_batch
from ..draws.keyed_generators import BEGIN, KeyedGenerators
from ..draws.users_code import is_users, module_of
from .samplers import (
    DistributedSampler,
    RandomSampler,
    SeekableSampler,
    SequentialSampler,
    algorithm_of,
    is_seekable,
    seed_of,
)
from .shares import Share
from .sizes import length_of

Indices = TypeVar("Indices", bound=list[Any])


@runtime_checkable
class Order(Protocol):
    """What replaces the batch sampler of a loader.

    Attributes:
        draws: whether its iteration runs code that may draw random numbers.
        is_own: whether it runs no code but this package's.
        unknown: the sampler of which nobody knows whether it repeats itself, None where that is known.
        kind: plain facts that a checkpoint keeps: with others, a position within an epoch would mean other samples.
        batch_size: how many indices of the sampler a batch takes; 1 where it yields whole batches.
        length: how many batches an epoch has here, None where that is unknown.
        even: whether the batches of all ranks are as large as this one's.
        common: whether what ranks read are parts of one order, each of them every so many of its samples.
    """

    draws: bool
    is_own: bool
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


class RankOrder:
    """Where the next iteration begins, on one rank of several.

    Attributes:
        within: how many samples of the first batch are left out; of one process only.
    """

    is_own = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.seed = self.epoch = self.batch = self.within = 0

    def begin(self, seed: int, epoch: int, batch: int) -> None:
        """Set seed, epoch and the first batch."""
        self.seed, self.epoch, self.batch, self.within = seed, epoch, batch, 0

    def position(self, batch: int, batch_size: int) -> KeyedPosition:
        """Return the position of a batch on this rank."""
        first = batch * batch_size * self.world_size + self.rank + self.left_out(batch)
        return KeyedPosition((self.seed, self.epoch, batch, self.rank), first, self.world_size)

    def left_out(self, batch: int) -> int:
        """Return how many samples of a batch are left out."""
        return self.within if batch == self.batch else 0


class SeekableOrder(RankOrder):
    """Batches of a seekable sampler: going to any position costs the same."""

    draws, unknown, even, common = False, None, True, True

    def __init__(
        self, sampler: SeekableSampler, batch_size: int, *, drop_last: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(rank, world_size)
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.is_own = _is_own(sampler)
        self.length: int | None = full_batches(len(sampler), batch_size, drop_last=drop_last)
        self.kind = {**_order_facts(sampler), "drop_last": drop_last}

    def __iter__(self) -> Iterator[KeyedBatch]:
        for batch, chosen in enumerate(self._chosen(KeyedBatch), self.batch):
            chosen.position = self.position(batch, self.batch_size)
            yield chosen

    def unkeyed(self) -> Iterator[list[int]]:
        """Return the indices of the same batches, without their positions."""
        return self._chosen(list)

    def _chosen(self, kind: Callable[[Iterable[int]], Indices]) -> Iterator[Indices]:
        size = self.batch_size
        start = min(self.batch * size + self.within, len(self.sampler))  # the last batch may be smaller
        indices, wanted = self.sampler.indices(self.seed, self.epoch, start), size - self.within
        while len(chosen := kind(islice(indices, wanted))) == wanted or (chosen and not self.drop_last):
            yield chosen
            wanted = size


class SingleOrder(RankOrder):
    """Indices of a seekable sampler, for a loader without automatic batching."""

    draws, unknown, even, common = False, None, False, True
    batch_size = 1

    def __init__(self, sampler: SeekableSampler, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)
        self.sampler, self.is_own = sampler, _is_own(sampler)
        self.length: int | None = len(sampler)
        self.kind = _order_facts(sampler)

    def __iter__(self) -> Iterator[KeyedIndex]:
        for batch, index in enumerate(self.sampler.indices(self.seed, self.epoch, self.batch), self.batch):
            yield KeyedIndex(index, self.position(batch, 1))


class Unkeyed:
    """The indices of an order alone, for data that cannot draw.

    Args:
        order: of seekable samplers.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._order, SeekableOrder):
            return self._order.unkeyed()
        return (each if isinstance(each, list) else each.index for each in self._order)


def _is_own(sampler: SeekableSampler) -> bool:
    while type(sampler) is DistributedSampler:
        sampler = sampler.sampler
    return type(sampler) in (RandomSampler, SequentialSampler)


def full_batches(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return how many batches there are of so many samples."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def _order_facts(sampler: SeekableSampler) -> dict[str, Any]:
    """Return what is known of a seekable sampler, without the part of a rank in it."""
    whole = sampler
    while isinstance(whole, DistributedSampler):
        whole = whole.sampler
    return {"order": algorithm_of(sampler), "seed": seed_of(sampler), "samples": len(whole)}


BLOCK = 256  # indices that a sampler is asked for under one key: more cost less, but are known longer ahead
Part = tuple[Any, int, int]  # what a rank takes of a round, the position of its first sample, and the stride


AHEAD = -2  # a sampler that draws does so under keys of its own, below those of the batches


class OpaqueSampler(RankOrder):
    """What runs any other sampler or batch sampler, under keys of its own.

    To reach a position its indices are skipped, no data is loaded.
    """

    draws = True
    inner: Any

    def __init__(self, inner: Any, share: Share) -> None:
        super().__init__(share.rank, share.world_size)
        self.inner = inner
        self.unknown = _unknown(inner)
        self.generators = KeyedGenerators(inner)
        self.kind = _facts(inner)

    def iterate_keyed(self, inner: Iterable[Any], block: int = 1) -> Iterator[Any]:
        """Yield what it yields in the epoch, asked for so many at a time, each time under a key."""
        self.generators.seed(self.seed, self.epoch, BEGIN)
        chosen = iter(inner)
        for number in count():
            self.generators.seed(self.seed, self.epoch, AHEAD - number)
            asked = list(islice(chosen, block))
            yield from asked
            if len(asked) < block:
                return


class OpaqueOrder(OpaqueSampler):
    """The order of a sampler or batch sampler that knows its rank."""

    def __init__(self, inner: Any, share: Share, *, batched: bool) -> None:
        super().__init__(inner, share)
        self.batched, self.length = batched, length_of(inner)
        plain = type(inner) is BatchSampler
        self.batch_size = inner.batch_size if plain else 1
        self.even = plain and isinstance(inner.sampler, TorchDistributedSampler)
        self.common = self.even

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        samples = 0
        for batch, indices in enumerate(self.iterate_keyed(self.inner)):
            before, samples = samples, samples + (len(indices) if self.batched else 1)  # batches may be of any sizes
            if batch < self.batch:
                continue
            key, gone = (self.seed, self.epoch, batch, self.rank), self.left_out(batch)
            position = KeyedPosition(key, before * self.world_size + self.rank + gone, self.world_size)
            yield keyed_batch(indices[gone:], position) if self.batched else KeyedIndex(indices, position)


def knows_ranks(sampler: Any) -> bool:
    """Return whether a sampler, or the one that it goes by, deals out to ranks by itself."""
    while sampler is not None:
        if hasattr(sampler, "num_replicas") or (hasattr(sampler, "rank") and hasattr(sampler, "world_size")):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def _facts(sampler: Any) -> dict[str, Any]:
    """Return what is known of a user's sampler or batch sampler, without the part of a rank in it."""
    if type(sampler) is BatchSampler:
        return {**_facts(sampler.sampler), "drop_last": sampler.drop_last}
    facts: dict[str, Any] = {"order": type(sampler).__name__, "seed": seed_of(sampler)}
    if knows_ranks(sampler):
        return {**facts, "samples": length_of(getattr(sampler, "dataset", None))}
    return {**facts, "length": length_of(sampler)}


def _unknown(sampler: Any) -> Any:
    """Return a sampler, or the one in it, whose state nobody compares: one of a library.

    A resume compares the attributes of the user's, and torch's have none but generators, which are keyed.
    """
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    module = module_of(type(inner))
    return None if module.startswith("torch.utils.data") or is_users(module) or is_seekable(inner) else inner


class DealtOrder(OpaqueSampler):
    """A user's sampler or batch sampler: every rank runs all of it, under the same keys, and takes its part.

    So the order of the samples is the same for any number of ranks.
    """

    batched, common = True, True
    batch_size: int
    length: int | None
    even: bool

    def rounds(self) -> Iterator[Part]:
        """Yield the part of this rank, round by round."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        for number, (indices, first, stride) in enumerate(self.rounds()):
            if number < self.batch:
                continue
            gone = self.left_out(number)
            position = KeyedPosition((self.seed, self.epoch, number, self.rank), first + gone, stride)
            yield keyed_batch(indices[gone:], position) if self.batched else KeyedIndex(indices, position)


class DealtSamples(DealtOrder):
    """The samples of a user's sampler, in turn to the ranks, and batched there.

    Args:
        batches: how a rank batches, and the sampler.
        share: the part of this process.
    """

    even = True

    def __init__(self, batches: BatchSampler, share: Share) -> None:
        super().__init__(batches, share)
        self.batch_size, self._drop_last = batches.batch_size, batches.drop_last
        samples, drop_last = length_of(batches.sampler), batches.drop_last
        of_each = None if samples is None else full_batches(samples, share.world_size, drop_last=drop_last)
        self.length = None if of_each is None else full_batches(of_each, self.batch_size, drop_last=drop_last)

    def rounds(self) -> Iterator[Part]:
        """Yield the samples of each round, a rank's every so many of them."""
        ranks, position = self.world_size, 0
        indices, size = self.iterate_keyed(self.inner.sampler, BLOCK), self.batch_size * ranks
        beginning = chosen = list(islice(indices, size))
        while len(chosen) == size or (chosen and not self._drop_last):
            filled = [*chosen, *islice(cycle(beginning), -len(chosen) % ranks)]
            yield filled[self.rank :: ranks], position + self.rank, ranks
            position += size
            chosen = list(islice(indices, size))


class DealtBatches(DealtOrder):
    """The batches of a user's batch sampler, or of a sampler whose indices are batches, in turn to the ranks.

    Args:
        inner: yields batches of indices, or single ones.
        share: the part of this process.
        batched: which of both.
    """

    even = False
    batch_size = 1

    def __init__(self, inner: Any, share: Share, *, batched: bool) -> None:
        super().__init__(inner, share)
        self.batched, self._drop_last = batched, bool(getattr(inner, "drop_last", False))
        self.draws = not is_seekable(inner)
        if is_seekable(inner):
            self.kind["order"] = algorithm_of(inner)
        batches = length_of(inner)
        self.length = None if batches is None else full_batches(batches, share.world_size, drop_last=self._drop_last)

    def rounds(self) -> Iterator[Part]:
        """Yield one of as many batches as there are ranks."""
        indices, ranks, position = self._indices(), self.world_size, 0
        beginning = chosen = list(islice(indices, ranks))
        while len(chosen) == ranks or (chosen and not self._drop_last):
            parts: list[Part] = []
            for each in islice(chain(chosen, cycle(beginning)), ranks):
                parts.append((each, position, 1))
                position += len(each) if self.batched else 1
            yield parts[self.rank]
            chosen = list(islice(indices, ranks))

    def _indices(self) -> Iterator[Any]:
        """Return all of an epoch; positions are those of samples, so the batches before one are counted, not read."""
        if is_seekable(self.inner):
            return iter(self.inner.indices(self.seed, self.epoch, 0))
        return self.iterate_keyed(self.inner)


class EveryNth:
    """Every batch of so many, as one process would read all of them: nothing is filled up and nothing left out.

    Args:
        order: of one process.
        rank: the first batch.
        world_size: how many batches on the next one is.
    """

    def __init__(self, order: Order, rank: int, world_size: int) -> None:
        self._order, self._rank, self._world_size = order, rank, world_size
        self.draws, self.is_own = order.draws, order.is_own
        self.unknown, self.kind = order.unknown, order.kind
        self.batch_size, self.even, self.common = order.batch_size, False, order.common
        self.length = None if order.length is None else len(range(rank, order.length, world_size))
        self._first = rank

    def begin(self, seed: int, epoch: int, batch: int) -> None:
        """Set seed, epoch and the first batch."""
        self._order.begin(seed, epoch, 0)
        self._first = batch * self._world_size + self._rank

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        return islice(iter(self._order), self._first, None, self._world_size)
