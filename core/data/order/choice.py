"""Which order replaces the sampler of a loader."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data import RandomSampler as TorchRandomSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from ...objects.equality import same
from ..draws.users_code import is_users, module_of
from .dealt import DealtBatches, DealtSamples, OpaqueOrder, Order, SeekableOrder, SingleOrder, knows_ranks
from .samplers import DistributedSampler, RandomSampler, SeekableSampler, SequentialSampler, is_seekable
from .shares import ALONE, Share


def order_of(loader: DataLoader[Any], share: Share = ALONE) -> Order:
    """Return the part of a process in the order that a map-style loader means.

    A sampler that deals out to ranks by itself is left alone.
    """
    batch_sampler: Any = loader.batch_sampler
    plain = type(batch_sampler) is BatchSampler
    indices = loader.sampler if batch_sampler is None else batch_sampler.sampler if plain else None
    known = None if indices is None else seekable(indices)
    if known is not None:
        size, drop_last = (batch_sampler.batch_size, batch_sampler.drop_last) if plain else (None, False)
        return _seekable_order(known, size, drop_last=drop_last, share=share)
    inner = loader.sampler if batch_sampler is None else batch_sampler
    if knows_ranks(inner):
        return OpaqueOrder(inner, share, batched=batch_sampler is not None)
    if plain:
        return DealtSamples(batch_sampler, share)
    return DealtBatches(inner, share, batched=batch_sampler is not None)


def _seekable_order(sampler: SeekableSampler, size: int | None, *, drop_last: bool, share: Share) -> Order:
    rank, world_size = share.rank, share.world_size
    if world_size > 1 and not knows_ranks(sampler):
        sampler = DistributedSampler(sampler, rank, world_size, drop_last=drop_last)
    order: Order
    if size is None:
        order = SingleOrder(sampler, rank, world_size)
    else:
        order = SeekableOrder(sampler, size, drop_last=drop_last, rank=rank, world_size=world_size)
    if not isinstance(sampler, DistributedSampler) and world_size > 1:  # how it deals out is unknown
        order.even = order.common = False
    return order


def seekable(sampler: Sampler[Any] | Iterable[Any]) -> SeekableSampler | None:
    """Return a seekable sampler that does what another means, or None where that is unknown.

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


_BATCHES = 100  # of an order that are compared: their indices cost little, but an order may have no end


def order_differs(order: Order, loader: DataLoader[Any], seed: int, epoch: int, batch: int) -> list[str]:
    """Return a sentence where a sampler of the user's promises an order by (seed, epoch), and gives two."""
    batches = loader.batch_sampler
    sampler = loader.sampler if type(batches) in (BatchSampler, type(None)) else batches
    if order.draws or not is_users(module_of(type(sampler))):
        return []
    drawn = []
    for _ in range(2):
        order.begin(seed, epoch, batch)
        drawn.append([_indices(chosen) for chosen in islice(order, _BATCHES)])
    if same(*drawn):
        return []
    return [
        f"{type(sampler).__name__} gives another order each time it is asked: it holds state that no key reaches (a "
        f"counter, a hidden generator), so a resumed run reads other samples: let indices(seed, epoch, start) go "
        f"by these alone"
    ]


def _indices(chosen: Any) -> Any:
    return list(chosen) if isinstance(chosen, list) else chosen.index
