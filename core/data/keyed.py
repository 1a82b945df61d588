"""Datasets that seed all generators for each batch by its position, in any process.

A batch sampler yields `KeyedBatch`es. The dataset seeds every generator by the key of the batch and then loads it. The
collate function follows in the same process and continues the same stream. So workers keep no state, and the result
does not depend on which worker loads a batch, on their number, or on how far ahead they read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from types import NoneType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.dataset import ConcatDataset, StackDataset, Subset, TensorDataset

from ...events.checks import describe_error
from ..objects.equality import VALUES, same
from ..system.extras import with_article
from .generators import Isolation, generator_states, isolated, key_generators, seed_all
from .rng import generator_state
from .users_code import attributes, is_by_user, search, set_by_epoch

_DATA: Final = frozenset(
    {NoneType, range, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # no subclasses, which may run any code when they are read
_DATASETS: Final = frozenset({TensorDataset, Subset, ConcatDataset, StackDataset})
_ALLOWED: Final = _DATA | _NESTED | _DATASETS
_DEEPEST: Final = 16  # levels; a container may contain itself
MOST_ITEMS: Final = 1000  # of a longer container only the length enters the digest
MOST_PARTS: Final = 50_000  # in the digest, the outermost first: some tens of milliseconds
BEGIN = -1  # in place of a position: for draws before the first batch


class KeyedGenerators:
    """The random generators of objects: searched in the process that uses them, in every epoch.

    Forked worker processes inherit the findings; persistent workers search again.

    Args:
        holders: objects that may contain generators.
        follower: gets the epoch through its `set_epoch` when the epoch changes, in every process.
    """

    def __init__(self, *holders: Any, follower: Any = None) -> None:
        self._holders, self._follower = holders, follower
        self._findings = search()
        self._epoch: int | None = None

    @property
    def may_hide_draws(self) -> bool:
        """Whether the objects contain generators, or read the state of the global ones without a draw."""
        return bool(self._findings.generators or self._findings.readers)

    def seed(self, seed: int, epoch: int, *position: int) -> None:
        self.begin_epoch(seed, epoch)
        seed_all(seed, epoch, *position)
        self.seed_own(seed, epoch, *position)

    def seed_own(self, seed: int, epoch: int, *position: int) -> None:
        # Without the global generators.
        self.begin_epoch(seed, epoch)
        if self._findings.generators:
            key_generators(self._findings.generators, seed, epoch, *position)

    def begin(self, seed: int, epoch: int) -> None:
        # Draws of `set_epoch` are keyed, so they are the same in every process.
        self._epoch = epoch
        self.look()
        if hasattr(self._follower, "set_epoch"):
            self.seed(seed, epoch, BEGIN)
            set_epoch(self._follower, epoch)
            self.look()

    def begin_epoch(self, seed: int, epoch: int) -> None:
        if epoch != self._epoch:
            self.begin(seed, epoch)

    def look(self) -> bool:
        # Searches again; returns whether a new generator was found.
        before = self._findings  # the objects stay alive until the ids are compared
        self._findings = search(*self._holders)
        return not set(map(id, self._findings.generators)) <= set(map(id, before.generators))

    def unkeyed(self, name: str) -> list[str]:
        """Return a sentence for each kind of object that cannot be seeded.

        Args:
            name: of the object that contains it.
        """
        kinds = dict.fromkeys(type(value).__qualname__ for value in self._findings.unseedable)
        return [
            f"{name} uses {with_article(kind)}, which cannot be seeded, so a resumed run continues with a different "
            f"state: {'use random.Random(seed)' if kind == 'SystemRandom' else 'use the index of the sample'}"
            for kind in kinds
        ]

    def states(self) -> list[Any]:
        return [generator_states(), *map(generator_state, self._findings.generators)]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has other generators
        return partial(KeyedGenerators, follower=self._follower), self._holders


def set_epoch(loader: Any, epoch: int) -> None:
    # For loaders and samplers that shuffle by the epoch.
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(setter := getattr(part, "set_epoch", None)):
            setter(epoch)


Key = tuple[int, ...]
ENDED = "The dataset raised StopIteration, which would end the epoch silently: only iterators may raise it."


class KeyedPosition(NamedTuple):
    """The key of the draws of a batch, and the positions of its samples in the global order."""

    key: Key
    first: int
    stride: int


class KeyedBatch(list[Any]):
    """The indices of a batch, with its position."""

    __slots__ = ("position",)
    position: KeyedPosition


class DatasetWrapper:
    """Forwards attributes to the wrapped object, so that user code in a worker can use and set them."""

    PREFIX: ClassVar[str] = "keyed_"  # of the attributes of the wrapper

    keyed_inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith((self.PREFIX, "__")):  # a copy is being made
            raise AttributeError(name)
        return getattr(self.keyed_inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(self.PREFIX):
            super().__setattr__(name, value)
        else:
            setattr(self.keyed_inner, name, value)

    def __len__(self) -> int:
        return len(self.keyed_inner)


class KeyedDataset(DatasetWrapper, Dataset[Any]):
    """A map-style dataset that loads `KeyedBatch`es; for other indices it equals the wrapped one.

    Args:
        inner: the user's dataset.
        collate: makes a batch under the same key; None if the loader does that.
        per_sample: whether each sample has its own key.
        is_batched: whether samples are collated; otherwise each is a complete batch.
        has_epoch: whether `inner.set_epoch` is called with the epoch, in every process.

    Attributes:
        keyed_probe: compares two loads of the first batch, if requested.
        keyed_isolation: `isolated()` if the training process loads, else None.
        keyed_is_silent: whether no batch has drawn so far. Seeding costs more than loading a small batch, so it is
            omitted until a batch draws, which is loaded again with its key.
    """

    def __init__(
        self, inner: Any, collate: Any, *, per_sample: bool, is_batched: bool = True, has_epoch: bool = False
    ) -> None:
        self.keyed_inner = inner
        self.keyed_collate = identity if collate is None else collate
        self.keyed_generators = KeyedGenerators(inner, collate, follower=inner if has_epoch else None)
        self.keyed_per_sample, self.keyed_is_batched = per_sample, is_batched
        self.keyed_has_begun = False
        self.keyed_probe: LoadProbe | None = None
        self.keyed_isolation: Isolation | None = None
        self.keyed_is_silent = not per_sample

    def __getitem__(self, index: Any) -> Any:
        return self.keyed_inner[index]

    def __getitems__(self, batch: KeyedBatch) -> Any:
        try:
            if self.keyed_isolation is None:  # a worker
                return self._load(batch) if self.keyed_has_begun else self._first(batch)
            if self.keyed_is_silent and self.keyed_has_begun and not self.keyed_generators.may_hide_draws:
                with self.keyed_isolation:
                    loaded = self._load_once(batch)
                if not self.keyed_isolation.has_drawn:
                    return loaded
                self.keyed_is_silent = False
            with self.keyed_isolation:
                return self._load(batch) if self.keyed_has_begun else self._first(batch)
        except StopIteration as error:
            raise RuntimeError(ENDED) from error

    def _first(self, batch: KeyedBatch) -> Any:
        # Loads again if the first load made a generator, which had no key then.
        self.keyed_has_begun = True
        if self.keyed_probe is not None and self.keyed_probe.is_due():
            return self._load_and_probe(batch, self.keyed_probe)
        loaded = self._load(batch)
        if self.keyed_generators.look():
            loaded = self._load(batch)
        self._note_draws(batch, self.keyed_generators.states())
        return loaded

    def _note_draws(self, batch: KeyedBatch, after: list[Any]) -> None:
        # `after`: the states after the batch was loaded.
        if self.keyed_is_silent and self.keyed_isolation is not None:
            self.keyed_generators.seed(*batch.position.key)
            self.keyed_is_silent = same(self.keyed_generators.states(), after)

    def _load_and_probe(self, batch: KeyedBatch, probe: LoadProbe) -> Any:
        generators, inner, per_sample = self.keyed_generators, self.keyed_inner, self.keyed_per_sample
        generators.begin_epoch(*batch.position.key[:2])
        self.keyed_per_sample = False  # one key, so that the states after it show all draws
        before = outline(inner)
        loaded = self._load(batch)
        if generators.look():
            loaded = self._load(batch)
        after = generators.states()
        self._note_draws(batch, after)
        elsewhere = partial(self._load, _under_another_key(batch)) if outline(inner) != before else None
        self.keyed_is_silent &= elsewhere is None  # a cache would keep what a batch draws without its key
        probe.compare((loaded, after), batch.position.key, partial(self._load, batch), elsewhere, generators)
        self.keyed_per_sample = per_sample
        return self._load(batch) if per_sample else loaded

    def _load(self, batch: KeyedBatch) -> Any:
        inner, position = self.keyed_inner, batch.position
        if not self.keyed_per_sample:
            self.keyed_generators.seed(*position.key)
            return self._load_once(batch)
        samples, (seed, epoch) = [], position.key[:2]
        for offset, index in enumerate(batch):
            self.keyed_generators.seed(seed, epoch, position.first + offset * position.stride)
            samples.append(inner[index])
        self.keyed_generators.seed(*position.key)  # for the collate function
        return self.keyed_collate(samples if self.keyed_is_batched else samples[0])

    def _load_once(self, batch: KeyedBatch) -> Any:
        inner = self.keyed_inner
        if not self.keyed_is_batched:
            return self.keyed_collate(inner[batch[0]])
        fetch = getattr(inner, "__getitems__", None)
        return self.keyed_collate(fetch(list(batch)) if fetch else [inner[index] for index in batch])


class KeyedIterable(DatasetWrapper, IterableDataset[Any]):
    """An iterable dataset that draws by (seed, epoch, worker), and with its own generators by the n-th batch, too.

    Seed and epoch are in shared memory, because persistent workers see no other change. Each worker seeds its copy.
    """

    def __init__(self, inner: Any, collate: Any, batch_size: int, rank: int) -> None:
        self.keyed_inner = inner
        self.keyed_generators = KeyedGenerators(inner, collate, follower=inner)
        self.keyed_batch_size, self.keyed_rank = batch_size, rank
        self.keyed_clock: Tensor = torch.zeros(2, dtype=torch.int64)
        self.keyed_clock.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def keyed_begin(self, seed: int, epoch: int) -> None:
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
                generators.seed_own(*key, count // size)
            try:
                item = next(items)
            except StopIteration:
                return
            yield item
            count += 1


def identity(loaded: Any) -> Any:
    # For data that are batches already.
    return loaded


def _under_another_key(batch: KeyedBatch) -> KeyedBatch:
    # No batch has this key.
    seed, *position_key = batch.position.key
    return keyed_batch(batch, batch.position._replace(key=(~seed, *position_key)))


def keyed_batch(indices: Sequence[Any], position: KeyedPosition) -> KeyedBatch:
    batch = KeyedBatch(indices)
    batch.position = position
    return batch


_ROOM = 4096  # bytes of shared memory for the findings of a worker process
LEFT_OUT = "RNGCapture(probe=False)"
NOT_COMPARED = "was not checked for hidden state"
HIDDEN = (
    "{} loads the same batch differently each time: it has state that cannot be seeded (a counter, a cache of drawn "
    "values, a hidden generator, the clock, os.urandom)"
)


class LoadProbe:
    """Compares two loads of one batch under one key, in the process that loads it; with several workers, in the first.

    It compares the batches, and the states of the generators after them, because a number from a cache is not drawn.

    Args:
        name: of the dataset.
        shared: whether another process compares.
    """

    def __init__(self, name: str, *, shared: bool) -> None:
        self._name = name
        self._words: Tensor = torch.zeros(_ROOM, dtype=torch.uint8)
        if shared:
            self._words.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation here

    def compare(
        self,
        first: tuple[Any, Any],
        key: Key,
        load: Callable[[], Any],
        elsewhere: Callable[[], Any] | None,
        generators: KeyedGenerators,
    ) -> None:
        """Load a batch again and compare it.

        Args:
            first: the first load, and the states of the generators after it.
            key: of the load.
            load: loads the batch again under the same key.
            elsewhere: loads it under another key, if the first load changed the dataset.
            generators: of the dataset.
        """
        sentences = generators.unkeyed(self._name)
        try:
            is_pure = same(first, (load(), generators.states()))
            if is_pure and elsewhere is not None:  # a cache of the first load would yield the same again
                generators.seed(*key)
                has_drawn = not same(generators.states(), first[1])
                is_pure = not (has_drawn and same(first[0], elsewhere()))
        except Exception as error:  # noqa: BLE001  # the run has its batch; the failure is reported
            sentences.append(f"{self._name} {NOT_COMPARED}: {describe_error(error)}")
        else:
            sentences += [] if is_pure else [HIDDEN.format(self._name)]
        self._write(sentences)

    def is_due(self) -> bool:
        # True in the process that compares.
        worker = get_worker_info()
        return worker is None or worker.id == 0

    def leave_out(self, reason: str, generators: KeyedGenerators | None = None) -> None:
        findings = [] if generators is None else generators.unkeyed(self._name)
        self._write([*findings, f"{self._name} {NOT_COMPARED}: {reason}"])

    def read(self) -> list[str]:
        # A sentence for each finding.
        words = bytes(self._words.numpy()).rstrip(b"\0")
        return list(json.loads(words)) if words.startswith(b"[") else []

    def _write(self, sentences: list[str]) -> None:
        text = [sentence[:500] for sentence in sentences]
        while len(words := json.dumps(text).encode()) > _ROOM:
            text.pop(0)
        written = torch.frombuffer(bytearray(words.ljust(_ROOM, b"\0")), dtype=torch.uint8)
        self._words[1:] = written[1:]
        self._words[0] = written[0]  # last: it makes the content readable for other processes


def is_plain_data(dataset: Any, collate: Any) -> bool:
    """True if a dataset is pure data, so that reading and collating it runs no code that could draw.

    Pure data are torch's own datasets, lists and tuples of tensors, arrays, numbers and strings, nested in any way, of
    exactly these types, collated by torch's own functions. Items of lists are checked too: a subclass of a tensor or
    mapping runs user code when it is collated.
    """
    modules = {getattr(function, "__module__", None) for function in default_collate_fn_map.values()}  # extensible
    is_torchs = any(collate is function for function in (default_collate, default_convert))
    return is_torchs and modules == {default_collate.__module__} and _is_plain(dataset)


def _is_plain(value: Any, levels: int = _DEEPEST) -> bool:
    if type(value) in _DATASETS:
        value = vars(value)  # a function there, which would shadow a method, is not plain
    kind = type(value)
    if kind not in _NESTED:
        return kind in _DATA
    # Container by container: one list of all values would be as large as the dataset.
    items = (*value, *value.values()) if kind is dict else value
    kinds = set(map(type, items))
    return kinds <= _DATA or (bool(levels) and kinds <= _ALLOWED and all(_is_plain(item, levels - 1) for item in items))


def outline(dataset: object) -> bytes:
    """Return a digest of the plain values in a dataset's attributes and parts.

    Values that `set_epoch` sets are ignored, because every copy gets the epoch; so are values deep in large data.
    """
    content, seen, parts = blake2b(digest_size=16), set[int](), [dataset]
    for value in parts:  # also over the parts that the loop adds
        if isinstance(value, VALUES):
            content.update(f"{value!r};".encode())
        elif len(parts) < MOST_PARTS and id(value) not in seen:
            seen.add(id(value))
            parts += _outlined(value)[: MOST_PARTS - len(parts)]
    return content.digest()


def _outlined(holder: Any) -> list[Any]:
    kind = type(holder)
    if kind in (list, tuple, dict):
        size = len(holder)
        items = [] if size > MOST_ITEMS else [*holder, *holder.values()] if kind is dict else holder
        return [size, *items]
    if not is_by_user(kind) and not str(kind.__module__).startswith("torch.utils.data"):
        return [kind.__qualname__]
    by_epoch = set_by_epoch(kind)
    return [part for name, value in attributes(holder) if name not in by_epoch for part in (name, value)]
