"""Datasets whose random draws are keyed by position: what a worker does, or this process in its stead.

A batch sampler yields `KeyedBatch`es; the dataset seeds every generator by the batch's key and then loads it. The
collate function follows in the same process and goes on in the same stream. So no worker holds state, and it does not
matter which one loads a batch, how many there are, or how far ahead they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .draws import find_generators, key_generators, seed_all

Key = tuple[int, ...]
BEGIN = -1  # in place of a position: what is drawn before the first batch
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


class Held:
    """The generators that objects hold, found in the process that uses them, anew in every epoch."""

    def __init__(self, *holders: Any) -> None:
        self._holders = holders
        self._found: list[Any] = []
        self._epoch: int | None = None

    def seed(self, seed: int, epoch: int, *place: int) -> None:
        """Seed the global generators and the held ones."""
        seed_all(seed, epoch, *place)
        if epoch != self._epoch:
            self._epoch, self._found = epoch, find_generators(self._holders)
        if self._found:
            key_generators(self._found, seed, epoch, *place)

    def __getstate__(self) -> dict[str, Any]:
        return {"_holders": self._holders, "_found": [], "_epoch": None}  # a copy elsewhere holds other generators


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
    """A map-style dataset that is asked for `KeyedBatch`es or `KeyedIndex`es, and else behaves as the one in it."""

    def __init__(self, inner: Any, collate: Any, *, per_sample: bool) -> None:
        self.keyed_inner = inner
        self.keyed_held = Held(inner, collate)
        self.keyed_per_sample = per_sample

    def __getitems__(self, batch: KeyedBatch) -> Any:
        """Load a batch under its key, or each of its samples under one of its own."""
        try:
            return self._one_by_one(batch) if self.keyed_per_sample else self._at_once(batch)
        except StopIteration as error:
            raise RuntimeError(ENDED) from error

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, KeyedIndex):
            return self.keyed_inner[index]
        place = index.place
        key = (*place.key[:2], place.first) if self.keyed_per_sample else place.key
        self.keyed_held.seed(*key)
        try:
            return self.keyed_inner[index.index]
        except StopIteration as error:
            raise RuntimeError(ENDED) from error

    def _at_once(self, batch: KeyedBatch) -> Any:
        inner = self.keyed_inner
        self.keyed_held.seed(*batch.place.key)
        fetch = getattr(inner, "__getitems__", None)
        return fetch(list(batch)) if fetch else [inner[index] for index in batch]

    def _one_by_one(self, batch: KeyedBatch) -> list[Any]:
        place, samples = batch.place, []
        seed, epoch = place.key[:2]
        for offset, index in enumerate(batch):
            self.keyed_held.seed(seed, epoch, place.first + offset * place.stride)
            samples.append(self.keyed_inner[index])
        self.keyed_held.seed(*place.key)  # for the collate function
        return samples


class KeyedIterable(Around, IterableDataset[Any]):
    """An iterable dataset that draws by (seed, epoch, worker, n-th batch).

    Seed and epoch lie in shared memory: workers that outlive an epoch see no other change.
    """

    def __init__(self, inner: Any, collate: Any, batch_size: int, rank: int) -> None:
        self.keyed_inner = inner
        self.keyed_held = Held(inner, collate)
        self.keyed_batch_size, self.keyed_rank = batch_size, rank
        self.keyed_clock: Tensor = torch.zeros(2, dtype=torch.int64)
        self.keyed_clock.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def keyed_begin(self, seed: int, epoch: int) -> None:
        """Set what the next pass draws by."""
        self.keyed_clock[0], self.keyed_clock[1] = seed, epoch

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


def _keyed_again(indices: list[Any], *place: Any) -> KeyedBatch:
    return keyed_batch(indices, Place(*place))


def keyed_batch(indices: Sequence[Any], place: Place) -> KeyedBatch:
    """Return indices with their place."""
    batch = KeyedBatch(indices)
    batch.place = place
    return batch
