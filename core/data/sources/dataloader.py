"""Reading a `DataLoader`, of map-style or iterable datasets, and any other iterable, from a position on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial
from itertools import count
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from ...system.extras import kind_of
from ..draws.generators import isolated
from ..draws.keyed import LEFT_OUT, DatasetWrapper, KeyedDataset, KeyedIterable, Probe, identity
from ..draws.keyed_generators import BEGIN, KeyedGenerators, set_epoch
from ..draws.object_parts import outline
from ..draws.users_code import Plainness
from ..order.choice import order_differs
from ..order.dealt import Order, RankOrder, Unkeyed
from ..order.shares import ALONE, Share
from .contract import Known
from .stateless import SEEKED, Certainty, Reading, Stateless


class Rewired(Stateless):
    """What is read through a copy of a `DataLoader`."""

    _own: DataLoader[Any]
    _known: bytes = b""  # what the persistent workers took with them

    def _begun(self, reading: Reading, dataset: DatasetWrapper) -> Iterator[Any]:
        """Return an iterator; persistent workers, which hold copies, start again where the dataset was changed."""
        if self._own.persistent_workers:
            now = outline(dataset.keyed_inner)
            if now != self._known:
                self.close()
            self._known = now
        return start_iterator(self._own, reading)

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
    cuts_batches = True

    def __init__(
        self, loader: DataLoader[Any], order: Order, share: Share, *, per_sample: bool = False, trains: bool = False
    ) -> None:
        known = loader.dataset.facts if isinstance(loader.dataset, Known) else {}
        kind = {"source": "map", "draws_per": "sample" if per_sample else "batch", **order.kind, **known}
        super().__init__(loader, kind, share)
        self._its_own_way = type(loader).__iter__ is not DataLoader.__iter__
        self.order, self.even, self.batch_size = order, order.even, order.batch_size
        self.common = order.common and not self._its_own_way
        collate = None if self._its_own_way else loader.collate_fn
        self.dataset = KeyedDataset(loader.dataset, collate, per_sample=per_sample, has_epoch=trains)
        self._sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
        collated = {} if self._its_own_way else {"collate_fn": identity}
        self._own = copy_loader(loader, dataset=self.dataset, **{self._sampler: self.order}, **collated)
        self._here = not loader.num_workers or not order.is_own
        self._may_be_plain = type(loader) is DataLoader and not loader.num_workers and order.is_own
        self._plainness = Plainness()
        self._probe: Probe | None = None
        self._of_order: list[str] = []
        self._is_armed, self._trains = False, trains
        if share.world_size > 1:
            self.length = None if self._its_own_way else order.length
            plain = loader.collate_fn in (default_collate, default_convert)  # another may leave samples out
            self.even = order.even and plain and not self._its_own_way

    def open(self, reading: Reading) -> Iterator[Any]:
        """Go to the position and read."""
        set_epoch(self.loader, reading.epoch)
        is_keyed = not (self._may_be_plain and self._is_plain())
        if is_keyed:
            with isolated():
                self.dataset.keyed_generators.begin(reading.seed, reading.epoch)  # for the workers, too
            self._arm(reading)
        self.order.begin(reading.seed, reading.epoch, 0 if self._its_own_way else reading.batch)
        if isinstance(self.order, RankOrder):
            self.order.within = reading.within
        if not is_keyed:  # nothing can draw
            return start_iterator(copy_loader(self.loader, **{self._sampler: Unkeyed(self.order)}), reading)
        batches = self._begun(reading, self.dataset)
        if self._its_own_way:
            return read_again(apart(batches, reading, KeyedGenerators(), self.share.rank), reading)
        return apart(batches) if self._here else batches

    def hidden(self) -> tuple[float, list[str]]:
        """Return what was found when the first batch was loaded."""
        seconds, sentences = (0.0, []) if self._probe is None else self._probe.read()
        return seconds, [*self._of_order, *sentences]

    def _is_plain(self) -> bool:
        return self._plainness.of(self.loader.dataset, self.loader.collate_fn)

    def _arm(self, reading: Reading) -> None:
        """Compare the first batch that is read, where that can show anything."""
        self.dataset.keyed_probe = None
        if self._is_armed or not reading.apart or not self._trains or self.certainty() != SEEKED:
            return
        self._is_armed = True
        if not self._is_plain():
            name, workers = type(self.loader.dataset).__name__, bool(self.loader.num_workers)
            self._probe = Probe(name, shared=workers, limit=self.loader.timeout)
        if reading.probes:
            self.dataset.keyed_probe = self._probe
            with isolated():
                self._of_order = order_differs(self.order, self.loader, reading.seed, reading.epoch, reading.batch)
        elif self._probe is not None:
            self._probe.leave_out(LEFT_OUT, self.dataset.keyed_generators)

    def certainty(self) -> Certainty:
        """Return that it is seeked, unless it has its own iteration or sampler, or workers deliver in any order."""
        if self._its_own_way:
            return "replayed", ()
        if self.order.unknown is not None:
            sampler = kind_of(self.order.unknown)
            return "seeked", (f"{sampler} may keep state that is not visible: give it indices(seed, epoch, start)",)
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            return "unknown", ("in_order=False lets workers deliver batches in any order",)
        return SEEKED


class IterableSource(Rewired):
    """A `DataLoader` of an iterable dataset: draws are keyed; a position is reached by reading again."""

    def __init__(self, loader: DataLoader[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterable"}, share)
        self.batch_size = loader.batch_size
        self.dataset = KeyedIterable(loader.dataset, loader.collate_fn, loader.batch_size or 1, share.rank)
        self._own = copy_loader(loader, dataset=self.dataset)
        self._changed_workers: str | None = None

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        self.dataset.keyed_begin(reading.seed, reading.epoch)
        batches = self._begun(reading, self.dataset)
        return read_again(batches if self._own.num_workers else apart(batches), reading)

    def certainty(self) -> Certainty:
        """Return that it is read again, and with how many workers."""
        return "replayed", ((self._changed_workers,) if self._changed_workers else ())

    def state_dict(self, batch: int) -> dict[str, Any]:
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
            self._own = copy_loader(self._own, **workers, timeout=self.loader.timeout if before else 0)


class OpaqueSource(Stateless):
    """Any other iterable of batches: a position is reached by reading again."""

    def __init__(self, loader: Iterable[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterator", "loader": type(loader).__name__}, share)

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from the epoch's start, and drop what was consumed."""
        set_epoch(self.loader, reading.epoch)
        if not reading.apart:
            return read_again(iter(self.loader), reading)
        generators, rank = KeyedGenerators(self.loader), self.share.rank
        return read_again(
            apart(start_iterator(self.loader, reading, generators, rank), reading, generators, rank), reading
        )

    def certainty(self) -> Certainty:
        """Return that it is read again."""
        return "replayed", ()


MASK = 2**63 - 1


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other parts; the user's own stays as it is."""
    own = shield_workers(loader)
    own.__dict__.update(changes)  # a loader refuses to have its parts set
    own.generator = torch.Generator()  # what a worker is first seeded by is drawn from it
    return own


def start_iterator(
    loader: Iterable[Any], reading: Reading, generators: KeyedGenerators | None = None, rank: int = 0
) -> Iterator[Any]:
    """Return an iterator; making it draws nothing from the training's random stream."""
    with isolated():
        if generators is not None:
            generators.seed(reading.seed, reading.epoch, rank, BEGIN)
        if isinstance(loader, DataLoader) and isinstance(loader.generator, torch.Generator) and generators is None:
            loader.generator.manual_seed((reading.seed + reading.epoch) & MASK)
        return iter(loader)


def apart(
    batches: Iterator[Any],
    reading: Reading | None = None,
    generators: KeyedGenerators | None = None,
    rank: int = 0,
    first: int = 0,
) -> Iterator[Any]:
    """Read batches in this process without touching the training's random stream.

    Given a reading, each is read under its key; otherwise the dataset sees to that.
    """
    isolation = isolated()
    for batch in count(first):
        with isolation:
            if reading is not None and generators is not None:
                generators.seed(reading.seed, reading.epoch, rank, batch)
            try:
                loaded = next(batches)
            except StopIteration:
                return
        yield loaded


def read_again(batches: Iterator[Any], reading: Reading) -> Iterator[Any]:
    """Return batches from the position on, after reading those before it once more."""
    batch = None
    for done in range(reading.batch):
        reading.report(done, reading.batch)
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError(
                f"The train loader ended after {done} batches of epoch {reading.epoch}, of which {reading.batch} had "
                f"been consumed when the checkpoint was written: resume with the data that it was written with."
            ) from None
    if reading.batch:
        reading.report(reading.batch, reading.batch)
        if reading.check is not None:
            reading.check(batch)
    return batches


LOOK = 1.0  # seconds between two looks at the main process, where the system reports nothing


def prepare_worker(worker_id: int, then: Callable[[int], None] | None = None) -> None:
    """In a worker process of a loader: end when the main process has ended, and leave signals to that one.

    A `worker_init_fn`. Torch's own watchdog looks for the main process only after it, and takes whatever process is
    the parent then for the main one: for ever, where the main process was killed before.

    Without it, workers would die of the SIGTERM that a cluster sends to the whole process group, and the main process
    of their death, before it has saved. A SIGTERM from the main process itself is obeyed, as that is how it gets rid of
    its workers. Where the system does not say who sent a signal (macOS, Windows), workers obey every SIGTERM.

    Args:
        worker_id: the worker's number, from 0.
        then: another `worker_init_fn`, called last.
    """
    main = parent_process()
    if main is not None:
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # threads inherit the mask
            threading.Thread(target=_obey, args=(main.pid,), name="heliograph-signals", daemon=True).start()
        threading.Thread(target=_follow, args=(main,), name="heliograph-main-process", daemon=True).start()
    if hasattr(signal, "SIGUSR1"):  # Windows has none
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if then is not None:
        then(worker_id)


def _follow(main: Any) -> None:
    """Wait until the main process has ended, then leave.

    Its sentinel says so, however early that was; but not while another process lives that the main one forked later,
    which holds the other end, too. Nor does the parent change in a worker that a fork server has started.
    """
    is_child = os.getppid() == main.pid
    while not wait([main.sentinel], LOOK):
        if (is_child and os.getppid() != main.pid) or not _exists(main.pid):
            break
    os._exit(1)


def _exists(pid: int) -> bool:
    if os.name != "posix":  # there the sentinel is the process, and signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it has another user now
        return True
    return True


def _obey(main: int | None) -> None:
    """Take every SIGTERM that comes; leave upon one of the main process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)


def shield_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader whose workers end with this process, and leave it to act upon signals to all."""
    own = copy(loader)
    own.__dict__["_iterator"] = None  # persistent workers are not shared
    init = loader.worker_init_fn
    if not isinstance(init, partial) or init.func is not prepare_worker:
        own.worker_init_fn = partial(prepare_worker, then=init)
    return own
