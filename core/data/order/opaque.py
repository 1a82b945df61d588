"""Samplers of which nothing is known but what they yield."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from ..batch import length_of
from ..draws.held_generators import BEGIN, Held
from ..draws.keyed import KeyedBatch, KeyedIndex, Place, keyed_batch
from .batch_samplers import Begun
from .samplers import is_seekable, seed_of
from .shares import Share

AHEAD = -2  # a sampler that draws does so under keys of its own, below those of the batches


class Foreign(Begun):
    """What runs any other sampler or batch sampler, under keys of its own.

    To reach a position its indices are passed over, no data is loaded.
    """

    draws = True
    inner: Any

    def __init__(self, inner: Any, share: Share) -> None:
        super().__init__(share.rank, share.world_size)
        self.inner, self.share = inner, share
        self.unknown = _unknown(inner)
        self.held = Held(inner)
        self.kind = _facts(inner)

    def pulled(self, inner: Iterable[Any], block: int = 1) -> Iterator[Any]:
        """Yield what it yields in the epoch, asked for so many at a time, each time under a key."""
        self.held.seed(self.seed, self.epoch, BEGIN)
        chosen = iter(inner)
        for number in count():
            self.held.seed(self.seed, self.epoch, AHEAD - number)
            asked = list(islice(chosen, block))
            yield from asked
            if len(asked) < block:
                return


class ForeignOrder(Foreign):
    """The order of a sampler or batch sampler that knows its rank."""

    def __init__(self, inner: Any, share: Share, *, batched: bool) -> None:
        super().__init__(inner, share)
        self.batched, self.length = batched, length_of(inner)
        plain = type(inner) is BatchSampler
        self.batch_size = inner.batch_size if plain else 1
        self.even = plain and isinstance(inner.sampler, DistributedSampler)
        self.common = self.even

    def __iter__(self) -> Iterator[KeyedBatch | KeyedIndex]:
        samples = 0
        for batch, indices in enumerate(self.pulled(self.inner)):
            before, samples = samples, samples + (len(indices) if self.batched else 1)  # batches may be of any sizes
            if batch < self.batch:
                continue
            key = self.seed, self.epoch, batch, self.rank
            place = Place(key, before * self.world_size + self.rank, self.world_size)
            yield keyed_batch(indices, place) if self.batched else KeyedIndex(indices, place)


def knows_ranks(sampler: Any) -> bool:
    """Return whether a sampler, or the one that it goes by, deals out to ranks by itself."""
    while sampler is not None:
        if hasattr(sampler, "num_replicas") or (hasattr(sampler, "rank") and hasattr(sampler, "world_size")):
            return True
        sampler = getattr(sampler, "sampler", None)
    return False


def _facts(sampler: Any) -> dict[str, Any]:
    """Return what is known of a foreign sampler or batch sampler, without the part of a rank in it."""
    if type(sampler) is BatchSampler:
        return {**_facts(sampler.sampler), "drop_last": sampler.drop_last}
    facts: dict[str, Any] = {"order": type(sampler).__name__, "seed": seed_of(sampler)}
    if knows_ranks(sampler):
        return {**facts, "samples": length_of(getattr(sampler, "dataset", None))}
    return {**facts, "length": length_of(sampler)}


def _unknown(sampler: Any) -> Any:
    """Return a sampler, or the one in it, that may have a state which no key reaches: any that is not torch's own."""
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    return None if type(inner).__module__.startswith("torch.utils.data") or is_seekable(inner) else inner
