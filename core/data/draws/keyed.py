"""Datasets whose random draws are keyed by position: what a worker does, or this process in its stead.

A batch sampler yields `KeyedBatch`es; the dataset seeds every generator by the batch's key and then loads it. The
collate function follows in the same process and continues the same stream. So no worker holds state, and it does not
matter which one loads a batch, how many there are, or how far ahead they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .equality import outline
from .generators import isolated
from .held_generators import BEGIN, Held
from .probe import Probe

Key = tuple[int, ...]
ENDED = "The dataset raised StopIteration, which would look like the end of the epoch: that is for iterators only."


class Place(NamedTuple):
    """Where a batch lies: the key of its draws, and the positions of its samples in the global order."""

    key: Key
    first: int
    stride: int


class KeyedBatch(list[Any]):
    """The indices of a batch, with its place."""

    __slots__ = ("place",)
    place: Place

    def __reduce__(self) -> Any:  # as it goes to a worker for every batch: half of what pickle finds out by itself
        return _keyed_again, (list(self), *self.place)


@dataclass(frozen=True, slots=True)
class KeyedIndex:
    """The index of what a loader without automatic batching takes for a batch, with its place."""

    index: Any
    place: Place


class Around:
    """Behaves as the object in it: code of the user's that runs in a worker sees and sets that one's attributes."""

    OWN: ClassVar[str] = "keyed_"  # what its own attributes begin with

    keyed_inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith((self.OWN, "__")):  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self.keyed_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(self.OWN):
            super().__setattr__(name, value)
        else:
            setattr(self.keyed_inner, name, value)

    def __len__(self) -> int:
        return len(self.keyed_inner)


class KeyedDataset(Around, Dataset[Any]):
    """A map-style dataset that is asked for `KeyedBatch`es or `KeyedIndex`es, and else behaves as the one in it.

    Args:
        inner: the user's.
        collate: what makes a batch of what is loaded, under the same key; None where that is done elsewhere.
        per_sample: whether each sample is loaded under a key of its own.
        has_epoch: whether `inner.set_epoch` is called with the epoch of what is loaded, in every process.

    Attributes:
        keyed_probe: compares two loads of the first batch, where that is wanted.
    """

    def __init__(self, inner: Any, collate: Any, *, per_sample: bool, has_epoch: bool = False) -> None:
        self.keyed_inner = inner
        self.keyed_collate = as_it_is if collate is None else collate
        self.keyed_held = Held(inner, collate, follower=inner if has_epoch else None)
        self.keyed_load = self._one_by_one if per_sample else self._at_once
        self.keyed_per_sample = per_sample
        self.keyed_has_begun = False
        self.keyed_probe: Probe | None = None

    def __getitems__(self, batch: KeyedBatch) -> Any:
        """Load a batch under its key, or each of its samples under one of its own."""
        try:
            return self.keyed_load(batch) if self.keyed_has_begun else self._first(self.keyed_load, batch)
        except StopIteration as error:
            raise RuntimeError(ENDED) from error

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, KeyedIndex):
            return self.keyed_inner[index]
        try:
            return self._single(index) if self.keyed_has_begun else self._first(self._single, index)
        except StopIteration as error:
            raise RuntimeError(ENDED) from error

    def _first(self, load: Callable[[Any], Any], chosen: Any) -> Any:
        """Load what this process loads first, once more where that made a generator, and see whether it repeats."""
        self.keyed_has_begun = True
        if self.keyed_probe is not None and self.keyed_probe.is_due():
            return self._probed(load, chosen, self.keyed_probe)
        loaded = load(chosen)
        return load(chosen) if self.keyed_held.look() else loaded

    def _probed(self, load: Callable[[Any], Any], chosen: Any, probe: Probe) -> Any:
        """Load the same, and compare it with another load."""
        held, inner, again = self.keyed_held, self.keyed_inner, partial(load, chosen)
        held.arrive(*chosen.place.key[:2])
        before, began = outline(inner), perf_counter()
        first = held.traced(again)
        if held.look():
            first = held.traced(again)
        if probe.limit and 3 * (perf_counter() - began) > probe.limit:
            probe.leave_out("a second load of a batch could outlast the loader's timeout", held)
        else:
            elsewhere = partial(load, _elsewhere(chosen)) if outline(inner) != before else None
            probe.compare(first, again, elsewhere, held)
        return first.loaded

    def _single(self, index: KeyedIndex) -> Any:
        place = index.place
        key = (*place.key[:2], place.first) if self.keyed_per_sample else place.key
        self.keyed_held.seed(*key)
        return self.keyed_collate(self.keyed_inner[index.index])

    def _at_once(self, batch: KeyedBatch) -> Any:
        inner = self.keyed_inner
        self.keyed_held.seed(*batch.place.key)
        fetch = getattr(inner, "__getitems__", None)
        return self.keyed_collate(fetch(list(batch)) if fetch else [inner[index] for index in batch])

    def _one_by_one(self, batch: KeyedBatch) -> Any:
        place, samples = batch.place, []
        seed, epoch = place.key[:2]
        for offset, index in enumerate(batch):
            self.keyed_held.seed(seed, epoch, place.first + offset * place.stride)
            samples.append(self.keyed_inner[index])
        self.keyed_held.seed(*place.key)  # for the collate function
        return self.keyed_collate(samples)


class KeyedIterable(Around, IterableDataset[Any]):
    """An iterable dataset that draws by (seed, epoch, worker, n-th batch).

    Seed and epoch lie in shared memory: workers that outlive an epoch see no other change. They set their copies.
    """

    def __init__(self, inner: Any, collate: Any, batch_size: int, rank: int) -> None:
        self.keyed_inner = inner
        self.keyed_held = Held(inner, collate, follower=inner)
        self.keyed_batch_size, self.keyed_rank = batch_size, rank
        self.keyed_clock: Tensor = torch.zeros(2, dtype=torch.int64)
        self.keyed_clock.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def keyed_begin(self, seed: int, epoch: int) -> None:
        """Set what the next pass draws by."""
        self.keyed_clock[0], self.keyed_clock[1] = seed, epoch
        with isolated():
            self.keyed_held.begin(seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        seed, epoch = self.keyed_clock.tolist()
        info = get_worker_info()
        key = (seed, epoch, self.keyed_rank, 0 if info is None else info.id)
        held, size = self.keyed_held, self.keyed_batch_size
        held.seed(*key, BEGIN)
        items, count = iter(self.keyed_inner), 0
        while True:
            if count % size == 0:
                held.seed(*key, count // size)
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            count += 1


def as_it_is(loaded: Any) -> Any:
    """Return what is a batch already."""
    return loaded


def _elsewhere(chosen: KeyedBatch | KeyedIndex) -> KeyedBatch | KeyedIndex:
    """Return the same indices under a key that no batch has."""
    seed, *rest = chosen.place.key
    place = chosen.place._replace(key=(~seed, *rest))
    return KeyedIndex(chosen.index, place) if isinstance(chosen, KeyedIndex) else keyed_batch(chosen, place)


def _keyed_again(indices: list[Any], *place: Any) -> KeyedBatch:
    return keyed_batch(indices, Place(*place))


def keyed_batch(indices: Sequence[Any], place: Place) -> KeyedBatch:
    """Return indices with their place."""
    batch = KeyedBatch(indices)
    batch.place = place
    return batch
