"""Where batches come from: how each kind of loader is read from a position on, and what a resume with it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, default_collate, default_convert

from ..batch import set_epoch
from ..draws.equality import outline
from ..draws.generators import isolated
from ..draws.held_generators import Held
from ..draws.keyed import Around, KeyedDataset, KeyedIterable, as_it_is
from ..draws.probe import LEFT_OUT, Probe, is_plain
from ..order.batch_samplers import Order
from ..order.choice import order_differs
from ..order.shares import ALONE, Share
from .contract import Known
from .reader import apart, begun, read_again, rewired
from .stateless import EXACT, Reading, Stateless, Worth


class Rewired(Stateless):
    """What is read through a copy of a `DataLoader`."""

    _own: DataLoader[Any]
    _known: bytes = b""  # what the persistent workers took with them

    def _begun(self, reading: Reading, dataset: Around) -> Iterator[Any]:
        """Return an iterator; persistent workers, which hold copies, begin anew where the dataset was changed."""
        if self._own.persistent_workers:
            now = outline(dataset.keyed_inner)
            if now != self._known:
                self.close()
            self._known = now
        return begun(self._own, reading)

    def close(self) -> None:
        """Let persistent workers go."""
        self._own._iterator = None  # the loader's own way to end them is to forget it


class MapSource(Rewired):
    """A `DataLoader` of a map-style dataset: order and draws are keyed, and no data is loaded to reach a position.

    Unless a subclass iterates in a way of its own, which may leave batches out: then it is read again.

    Args:
        loader: the user's.
        order: its part of it.
        share: the part of this process.
        per_sample: whether draws are keyed by sample.
        trains: whether it is read epoch by epoch, as the dataset's `set_epoch` takes it.
    """

    as_it_is = False

    def __init__(
        self, loader: DataLoader[Any], order: Order, share: Share, *, per_sample: bool = False, trains: bool = False
    ) -> None:
        known = loader.dataset.facts if isinstance(loader.dataset, Known) else {}
        kind = {"source": "map", "draws_per": "sample" if per_sample else "batch", **order.kind, **known}
        super().__init__(loader, kind, share)
        self.order, self.even, self.common, self.batch_size = order, order.even, order.common, order.batch_size
        self._its_own_way = type(loader).__iter__ is not DataLoader.__iter__
        collate = None if self._its_own_way else loader.collate_fn
        self.dataset = KeyedDataset(loader.dataset, collate, per_sample=per_sample, tells_epoch=trains)
        sampler = {"sampler" if loader.batch_sampler is None else "batch_sampler": self.order}
        collated = {} if self._its_own_way else {"collate_fn": as_it_is}
        self._own = rewired(loader, dataset=self.dataset, **sampler, **collated)
        self._here = not loader.num_workers or self.order.draws
        self._probe: Probe | None = None
        self._of_order: list[str] = []
        self._is_armed, self._trains = False, trains
        if share.ranks > 1:
            self.length = None if self._its_own_way else order.length
            self.common = order.common and not self._its_own_way
            plain = loader.collate_fn in (default_collate, default_convert)  # another may leave samples out
            self.even = order.even and plain and not self._its_own_way

    def open(self, reading: Reading) -> Iterator[Any]:
        """Go to the position and read."""
        set_epoch(self.loader, reading.epoch)
        with isolated():
            self.dataset.keyed_held.begin(reading.seed, reading.epoch)  # for the workers, too
        self._arm(reading)
        self.order.begin(reading.seed, reading.epoch, 0 if self._its_own_way else reading.batch)
        batches = self._begun(reading, self.dataset)
        if self._its_own_way:
            return read_again(apart(batches, reading, Held(), self.share.rank), reading)
        return apart(batches) if self._here else batches

    def hidden(self) -> tuple[float, list[str]]:
        """Return what was found when the first batch was loaded."""
        seconds, sentences = (0.0, []) if self._probe is None else self._probe.read()
        return seconds, [*self._of_order, *sentences]

    def _arm(self, reading: Reading) -> None:
        """Have the first batch that is read compared, where that can tell anything."""
        self.dataset.keyed_probe = None
        if self._is_armed or not reading.apart or not self._trains or self.worth() != EXACT:
            return
        self._is_armed = True
        if not is_plain(self.loader.dataset, self.loader.collate_fn):
            name, workers = type(self.loader.dataset).__name__, bool(self.loader.num_workers)
            self._probe = Probe(name, shared=workers, limit=self.loader.timeout)
        if reading.probes:
            self.dataset.keyed_probe = self._probe
            with isolated():
                self._of_order = order_differs(self.order, self.loader, reading.seed, reading.epoch, reading.batch)
        elif self._probe is not None:
            self._probe.leave_out(LEFT_OUT, self.dataset.keyed_held)

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

    def __init__(self, loader: DataLoader[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterable"}, share)
        self.batch_size = loader.batch_size
        self.dataset = KeyedIterable(loader.dataset, loader.collate_fn, loader.batch_size or 1, share.rank)
        self._own = rewired(loader, dataset=self.dataset)
        self._changed_workers: str | None = None

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        self.dataset.keyed_begin(reading.seed, reading.epoch)
        batches = self._begun(reading, self.dataset)
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


class ForeignSource(Stateless):
    """Any other iterable of batches: a position is reached by reading again."""

    def __init__(self, loader: Iterable[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterator", "loader": type(loader).__name__}, share)

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        if not reading.apart:
            return read_again(iter(self.loader), reading)
        held, rank = Held(self.loader), self.share.rank
        return read_again(apart(begun(self.loader, reading, held, rank), reading, held, rank), reading)

    def worth(self) -> Worth:
        """Say that it is read again."""
        return "replayed", (f"a {type(self.loader).__name__} is read again up to the position",)
