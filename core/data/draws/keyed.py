"""Datasets in loader workers or here: seeded for each batch by its position; the first batch is loaded twice.

A batch sampler yields `KeyedBatch`es; the dataset seeds every generator by the batch's key and then loads it. The
collate function follows in the same process and continues the same stream. So no worker holds state, and it does not
matter which one loads a batch, how many there are, or how far ahead they read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ....events.errors import describe_error
from ...objects.equality import same
from .generators import isolated
from .keyed_generators import BEGIN, KeyedGenerators, TracedLoad
from .object_parts import outline

Key = tuple[int, ...]
ENDED = "The dataset raised StopIteration, which would look like the end of the epoch: that is for iterators only."


class KeyedPosition(NamedTuple):
    """Where a batch lies: the key of its draws, and the positions of its samples in the global order."""

    key: Key
    first: int
    stride: int


class KeyedBatch(list[Any]):
    """The indices of a batch, with its position."""

    __slots__ = ("position",)
    position: KeyedPosition

    def __reduce__(self) -> Any:  # as it goes to a worker for every batch: half of what pickle finds out by itself
        return _rebuild_keyed_batch, (list(self), *self.position)


@dataclass(frozen=True, slots=True)
class KeyedIndex:
    """The index of what a loader without automatic batching takes for a batch, with its position."""

    index: Any
    position: KeyedPosition


class DatasetWrapper:
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


class KeyedDataset(DatasetWrapper, Dataset[Any]):
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
        self.keyed_collate = identity if collate is None else collate
        self.keyed_generators = KeyedGenerators(inner, collate, follower=inner if has_epoch else None)
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
            return self._load_and_probe(load, chosen, self.keyed_probe)
        loaded = load(chosen)
        return load(chosen) if self.keyed_generators.look() else loaded

    def _load_and_probe(self, load: Callable[[Any], Any], chosen: Any, probe: Probe) -> Any:
        """Load the same, and compare it with another load."""
        generators, inner, again = self.keyed_generators, self.keyed_inner, partial(load, chosen)
        generators.arrive(*chosen.position.key[:2])
        before, began = outline(inner), perf_counter()
        first = generators.traced(again)
        if generators.look():
            first = generators.traced(again)
        if probe.limit and 3 * (perf_counter() - began) > probe.limit:
            probe.leave_out("a second load of a batch could outlast the loader's timeout", generators)
        else:
            elsewhere = partial(load, _under_another_key(chosen)) if outline(inner) != before else None
            probe.compare(first, again, elsewhere, generators)
        return first.loaded

    def _single(self, index: KeyedIndex) -> Any:
        position = index.position
        key = (*position.key[:2], position.first) if self.keyed_per_sample else position.key
        self.keyed_generators.seed(*key)
        return self.keyed_collate(self.keyed_inner[index.index])

    def _at_once(self, batch: KeyedBatch) -> Any:
        inner = self.keyed_inner
        self.keyed_generators.seed(*batch.position.key)
        fetch = getattr(inner, "__getitems__", None)
        return self.keyed_collate(fetch(list(batch)) if fetch else [inner[index] for index in batch])

    def _one_by_one(self, batch: KeyedBatch) -> Any:
        position, samples = batch.position, []
        seed, epoch = position.key[:2]
        for offset, index in enumerate(batch):
            self.keyed_generators.seed(seed, epoch, position.first + offset * position.stride)
            samples.append(self.keyed_inner[index])
        self.keyed_generators.seed(*position.key)  # for the collate function
        return self.keyed_collate(samples)


class KeyedIterable(DatasetWrapper, IterableDataset[Any]):
    """An iterable dataset that draws by (seed, epoch, worker, n-th batch).

    Seed and epoch lie in shared memory: workers that outlive an epoch see no other change. They set their copies.
    """

    def __init__(self, inner: Any, collate: Any, batch_size: int, rank: int) -> None:
        self.keyed_inner = inner
        self.keyed_generators = KeyedGenerators(inner, collate, follower=inner)
        self.keyed_batch_size, self.keyed_rank = batch_size, rank
        self.keyed_clock: Tensor = torch.zeros(2, dtype=torch.int64)
        self.keyed_clock.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def keyed_begin(self, seed: int, epoch: int) -> None:
        """Set what the next pass draws by."""
        self.keyed_clock[0], self.keyed_clock[1] = seed, epoch
        with isolated():
            self.keyed_generators.begin(seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        seed, epoch = self.keyed_clock.tolist()
        info = get_worker_info()
        key = (seed, epoch, self.keyed_rank, 0 if info is None else info.id)
        generators, size = self.keyed_generators, self.keyed_batch_size
        generators.seed(*key, BEGIN)
        items, count = iter(self.keyed_inner), 0
        while True:
            if count % size == 0:
                generators.seed(*key, count // size)
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            count += 1


def identity(loaded: Any) -> Any:
    """Return what is a batch already."""
    return loaded


def _under_another_key(chosen: KeyedBatch | KeyedIndex) -> KeyedBatch | KeyedIndex:
    """Return the same indices under a key that no batch has."""
    seed, *rest = chosen.position.key
    position = chosen.position._replace(key=(~seed, *rest))
    return KeyedIndex(chosen.index, position) if isinstance(chosen, KeyedIndex) else keyed_batch(chosen, position)


def _rebuild_keyed_batch(indices: list[Any], *position: Any) -> KeyedBatch:
    return keyed_batch(indices, KeyedPosition(*position))


def keyed_batch(indices: Sequence[Any], position: KeyedPosition) -> KeyedBatch:
    """Return indices with their position."""
    batch = KeyedBatch(indices)
    batch.position = position
    return batch


_ROOM = 4096  # bytes for what was found, which a worker process writes into shared memory
LEFT_OUT = "RNGCapture(probe=False)"
NOT_COMPARED = "was not loaded twice and compared, so hidden state in it was not found"
HIDDEN = (
    "{} loads the same batch differently each time: it holds state that no key reaches (a counter, a cache of what was "
    "drawn, a hidden generator, the clock, os.urandom)"
)


class Probe:
    """Compares two loads of one batch under one key, in the process that loads it; of several workers, the first.

    Compared are the batches, and the states of the generators afterwards: a number out of a cache is not drawn.

    Args:
        name: of the dataset.
        shared: whether another process is to compare.
        limit: seconds that a worker may take for a batch, 0 for any.
    """

    def __init__(self, name: str, *, shared: bool, limit: float = 0) -> None:
        self._name, self.limit = name, limit
        self._words: Tensor = torch.zeros(_ROOM, dtype=torch.uint8)
        if shared:
            self._words.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def compare(
        self,
        first: TracedLoad,
        load: Callable[[], Any],
        elsewhere: Callable[[], Any] | None,
        generators: KeyedGenerators,
    ) -> None:
        """Load a batch again.

        Args:
            first: what came the first time.
            load: loads it again under the same key.
            elsewhere: loads it under another key, where the dataset was changed by the first load.
            generators: those of the dataset.
        """
        began = perf_counter()
        sentences = generators.unkeyed(self._name)
        try:
            is_pure = _is_pure(first, load, elsewhere, generators)
        except Exception as error:  # noqa: BLE001  # the run has its batch; what is not known is said
            sentences.append(f"{self._name} {NOT_COMPARED}: {describe_error(error)}")
        else:
            sentences += [] if is_pure else [HIDDEN.format(self._name)]
        self._write(perf_counter() - began, sentences)

    def is_due(self) -> bool:
        """Return whether it is this process that compares."""
        worker = get_worker_info()
        return worker is None or worker.id == 0

    def leave_out(self, reason: str, generators: KeyedGenerators | None = None) -> None:
        """Say why nothing is loaded twice."""
        known = [] if generators is None else generators.unkeyed(self._name)
        self._write(0.0, [*known, f"{self._name} {NOT_COMPARED}: {reason}"])

    def read(self) -> tuple[float, list[str]]:
        """Return the seconds that it took, and a sentence for each thing that was found."""
        words = bytes(self._words.numpy()).rstrip(b"\0")
        seconds, *sentences = json.loads(words if words.startswith(b"[") else b"[0.0]")
        return seconds, sentences

    def _write(self, seconds: float, sentences: list[str]) -> None:
        text = [each[:500] for each in sentences]
        while len(words := json.dumps([seconds, *text]).encode()) > _ROOM:
            text.pop(0)
        written = torch.frombuffer(bytearray(words.ljust(_ROOM, b"\0")), dtype=torch.uint8)
        self._words[1:] = written[1:]
        self._words[0] = written[0]  # last: until then there is nothing for another process to read


def _is_pure(
    first: TracedLoad, load: Callable[[], Any], elsewhere: Callable[[], Any] | None, generators: KeyedGenerators
) -> bool:
    """Return whether nothing of the first load shows in a later one."""
    again = generators.traced(load)
    if not same(first.loaded, again.loaded) or not same(first.states, again.states):
        return False
    if elsewhere is None or not generators.has_drawn(first):
        return True
    return not same(first.loaded, elsewhere())  # what is drawn each time may still have been kept from the first
