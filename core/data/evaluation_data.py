"""The data of validations, tests and predictions: read in order, every batch by one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

from ...events import Engine
from ..system.extras import kind_of
from .dataloader import IterableSource, MapSource
from .dealt import EveryNth, knows_ranks, order_of
from .limited import Limit, limited_length
from .rng import digest
from .samplers import RandomSampler
from .sizes import Share, length_of
from .source import Reading, SequenceSource, Source, Sourced
from .stateful import is_stateful

DRAWN = (RandomSampler, TorchRandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class EvaluationData:
    """Reads evaluation loaders; on several ranks, each reads a part of the batches.

    Of W ranks, rank r reads the batches r, r + W, r + 2W, ... of the order of a single process. No batch is read twice
    or skipped, so ranks may have different numbers of batches, or none.

    Args:
        share: the part of this process.
        note: called with a line about a loader that every rank reads completely.
        engine: connects several ranks.
    """

    def __init__(self, share: Share, note: Callable[[str], None], engine: Engine | None = None) -> None:
        self._share, self._note, self._engine = share, note, engine
        self._sources: dict[int, Source | None] = {}
        self._undealt: set[int] = set()  # loaders that every rank reads completely, or that are distributed already

    def deals_out(self, loader: Any) -> bool:
        if self._engine is None:
            return True
        self._source(loader)
        return id(loader) not in self._undealt

    def length(self, loader: Any, limit: Limit | None = None) -> int | None:
        source = self._source(loader) if self._share.world_size > 1 else None
        length = length_of(loader) if source is None else source.length
        most = None if limit is None else self._most(loader, limit)
        return length if length is None or most is None else min(length, most)

    def open(
        self, loader: Any, number: int, validations: int, seed: int | None, limit: Limit | None = None
    ) -> Iterator[Any]:
        """Return the batches that this process reads.

        Args:
            loader: as the user gave it.
            number: of the set within the evaluation.
            validations: the number of earlier ones.
            seed: for the draws of a `DataLoader`; None if a single process continues its random stream.
            limit: of the batches of all ranks together, from the start of the set.
        """
        source = self._source(loader) if seed is not None else None
        if source is None or seed is None:
            batches = iter(loader)
        else:
            key = int.from_bytes(digest(seed, number, size=7, purpose=b"validation"), "little")
            batches = source.open(Reading(key, validations, 0, True, lambda *_: None))
        return batches if limit is None else islice(batches, self._most(loader, limit))

    def close(self) -> None:
        for source in filter(None, self._sources.values()):
            source.close()

    def _most(self, loader: Any, limit: Limit) -> int:
        # For this process, so that all ranks together read the limit.
        length, share, source = length_of(loader), self._share, self._source(loader)
        most = limited_length(limit, length, "validation or test set")
        is_dealt = share.world_size > 1 and source is not None and not source.as_it_is
        return len(range(share.rank, most, share.world_size)) if is_dealt else most

    def _source(self, loader: Any) -> Source | None:
        if id(loader) not in self._sources:
            self._sources[id(loader)] = self._made(loader)
        return self._sources[id(loader)]

    def _made(self, loader: Any) -> Source | None:
        share = self._share
        if type(loader) in (list, tuple):
            return SequenceSource(loader, share, fills_up=False) if share.world_size > 1 else None
        if isinstance(loader, Sourced):
            return loader.source(share, self._engine, fills_up=False)
        if not isinstance(loader, DataLoader) or is_stateful(loader):
            return self._undealt_source(loader, None)
        if isinstance(loader.dataset, IterableDataset):
            return self._undealt_source(loader, IterableSource(loader))
        order = order_of(loader)
        if knows_ranks(loader.batch_sampler) or knows_ranks(loader.sampler):
            self._undealt.add(id(loader))
        elif share.world_size > 1:
            order = EveryNth(order, share.rank, share.world_size)
        return MapSource(loader, order, share)

    def _undealt_source(self, loader: Any, source: Source | None) -> Source | None:
        self._undealt.add(id(loader))
        if self._share.world_size > 1:
            self._note(
                f"all {self._share.world_size} ranks read all of {kind_of(loader)} in an evaluation: select a part "
                f"by run.engine.rank, or every rank does all of the work"
            )
        return source


def check_in_order(loader: Any) -> None:
    # `predict` needs every sample once, in the order of the data.
    if not isinstance(loader, DataLoader):
        return
    is_random = isinstance(loader.sampler, DRAWN) or getattr(loader.sampler, "shuffle", False)
    if is_random or left_out(loader):
        problem = f"has a random order ({type(loader.sampler).__name__})" if is_random else "drops the last ones"
        raise ValueError(
            f"predict returns outputs of all samples in the order of the data, but this loader {problem}: use "
            f"shuffle=False and drop_last=False."
        )


def left_out(loader: Any) -> str:
    # In words, for messages; empty if `drop_last` drops no sample.
    batches: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if not getattr(batches, "drop_last", False) or not getattr(batches, "batch_size", None):
        return ""
    samples = length_of(loader.dataset if isinstance(loader.dataset, IterableDataset) else batches.sampler)
    if samples is None:
        return "the samples of an incomplete last batch"
    dropped = samples % batches.batch_size
    return f"{dropped} of {samples} samples" if dropped else ""
