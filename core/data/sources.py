"""Where batches come from: how each kind of loader is read from a position on, and what a resume with it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..batches import set_epoch
from .keyed import Held, KeyedDataset, KeyedIterable
from .orders import order_of
from .reading import Reading, apart, begun, read_again, rewired
from .source import EXACT, Source, Stateless, Worth
from .stateful import StatefulSource


class Rewired(Stateless):
    """What is read through a copy of a `DataLoader`."""

    _own: DataLoader[Any]

    def close(self) -> None:
        """Let persistent workers go."""
        self._own._iterator = None  # the loader's own way to end them is to forget it


class MapSource(Rewired):
    """A `DataLoader` of a map-style dataset: order and draws are keyed, and no data is loaded to reach a position.

    Unless a subclass iterates in a way of its own, which may leave batches out: then it is read again.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, *, per_sample: bool = False) -> None:
        self.order = order_of(loader, rank, world_size)
        kind = {"source": "map", "draws_per": "sample" if per_sample else "batch", **self.order.kind}
        super().__init__(loader, kind)
        self.dataset = KeyedDataset(loader.dataset, loader.collate_fn, per_sample=per_sample)
        sampler = {"sampler" if loader.batch_sampler is None else "batch_sampler": self.order}
        self._own = rewired(loader, dataset=self.dataset, **sampler)
        self._here = not loader.num_workers or self.order.draws
        self._rank = rank
        self._its_own_way = type(loader).__iter__ is not DataLoader.__iter__

    def open(self, reading: Reading) -> Iterator[Any]:
        """Go to the position and read."""
        set_epoch(self.loader, reading.epoch)
        self.order.begin(reading.seed, reading.epoch, 0 if self._its_own_way else reading.batch)
        batches = begun(self._own, reading)
        if self._its_own_way:
            return read_again(apart(batches, reading, Held(), self._rank), reading)
        return apart(batches) if self._here else batches

    def worth(self) -> Worth:
        """Say that it is exact, unless it goes its own way, or the sampler may, or workers deliver in any order."""
        if self._its_own_way:
            return "replayed", (f"a {type(self.loader).__name__} iterates in its own way, so it is read again",)
        if self.order.unknown is not None:
            name = type(self.order.unknown).__name__
            return "not exact", (f"a {name} may keep a state that no key reaches: give it indices(seed, epoch, start)",)
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            return "not exact", ("in_order=False lets workers deliver batches in any order",)
        return EXACT


class IterableSource(Rewired):
    """A `DataLoader` of an iterable dataset: draws are keyed; a position is reached by reading again."""

    def __init__(self, loader: DataLoader[Any], rank: int) -> None:
        super().__init__(loader, {"source": "iterable", "batch_size": loader.batch_size})
        self.dataset = KeyedIterable(loader.dataset, loader.collate_fn, loader.batch_size or 1, rank)
        self._own = rewired(loader, dataset=self.dataset)
        self._changed_workers: str | None = None

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        set_epoch(self.loader.dataset, reading.epoch)
        self.dataset.keyed_begin(reading.seed, reading.epoch)
        batches = begun(self._own, reading)
        return read_again(batches if self._own.num_workers else apart(batches), reading)

    def worth(self) -> Worth:
        """Say that it is read again, and with how many workers."""
        reasons = ("an iterable dataset is read again up to the position",)
        return "replayed", reasons + ((self._changed_workers,) if self._changed_workers else ())

    def state_dict(self, *, between_epochs: bool) -> dict[str, Any]:
        """Return the number of workers, which the order of an iterable dataset depends on."""
        return {"workers": self._own.num_workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read with as many workers as the run that is resumed did."""
        before, now = state["workers"], self.loader.num_workers
        if before != now:
            self._changed_workers = (
                f"{before} workers read, as when the run began, not {now}: the order depends on their number"
            )
            ahead = (self.loader.prefetch_factor or 2) if before else None
            keep = self.loader.persistent_workers and before > 0
            workers = {"num_workers": before, "prefetch_factor": ahead, "persistent_workers": keep}
            self._own = rewired(self._own, **workers, timeout=self.loader.timeout if before else 0)


class SequenceSource(Stateless):
    """A list or tuple of batches."""

    def __init__(self, loader: Sequence[Any]) -> None:
        super().__init__(loader, {"source": "sequence", "batches": len(loader)})

    def open(self, reading: Reading) -> Iterator[Any]:
        """Begin at the position."""
        return islice(self.loader, reading.batch, None) if reading.batch else iter(self.loader)


class ForeignSource(Stateless):
    """Any other iterable of batches: a position is reached by reading again."""

    def __init__(self, loader: Iterable[Any], rank: int) -> None:
        super().__init__(loader, {"source": "iterator", "loader": type(loader).__name__})
        self._rank = rank

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        if not reading.apart:
            return read_again(iter(self.loader), reading)
        held = Held(self.loader)
        return read_again(apart(begun(self.loader, reading, held, self._rank), reading, held, self._rank), reading)

    def worth(self) -> Worth:
        """Say that it is read again."""
        return "replayed", (f"a {type(self.loader).__name__} is read again up to the position",)


def source_of(loader: Any, rank: int, world_size: int, *, per_sample: bool = False) -> Source:
    """Return the source that reads a loader."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulSource(loader, rank)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            return IterableSource(loader, rank)
        return MapSource(loader, rank, world_size, per_sample=per_sample)
    return SequenceSource(loader) if type(loader) in (list, tuple) else ForeignSource(loader, rank)
