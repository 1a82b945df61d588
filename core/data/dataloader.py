"""Sources for a `DataLoader` and for any other iterable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cached_property, partial
from itertools import count
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from ..system.extras import kind_of
from . import keyed
from .dealt import Order
from .generators import Isolation, OwnStream, isolated
from .sizes import ALONE, Share
from .source import SEEKED, Certainty, FactsDataset, Reading, Source


class Rewired(Source):
    """A source that reads through a copy of a `DataLoader`."""

    _copy: DataLoader[Any]
    _outline: bytes = b""  # of the dataset in the persistent workers

    def _begun(self, reading: Reading, dataset: keyed.DatasetWrapper) -> Iterator[Any]:
        # Persistent workers have copies of the dataset, so they restart if it has changed.
        if self._copy.persistent_workers:
            now = keyed.outline(dataset.keyed_inner)
            if now != self._outline:
                self.close()
            self._outline = now
        return start_iterator(self._copy, reading)

    def close(self) -> None:
        self._copy._iterator = None  # this is how a loader ends them


class MapSource(Rewired):
    """A `DataLoader` of a map-style dataset: order and draws are keyed, and seeking loads no data.

    A subclass with its own `__iter__` may skip batches, so it is read again instead.

    Args:
        loader: the user's.
        order: the part of this process.
        share: the part of this process.
        per_sample: whether draws are keyed by sample.
        trains: whether it is read epoch by epoch, and the dataset gets `set_epoch`.
    """

    as_it_is = False

    def __init__(
        self, loader: DataLoader[Any], order: Order, share: Share, *, per_sample: bool = False, trains: bool = False
    ) -> None:
        facts = loader.dataset.facts if isinstance(loader.dataset, FactsDataset) else {}
        kind = {"source": "map", "draws_per": "sample" if per_sample else "batch", **order.kind, **facts}
        super().__init__(loader, kind, share)
        self._has_own_iter = type(loader).__iter__ is not DataLoader.__iter__
        self.order, self.even, self.batch_size = order, order.even, order.batch_size
        self.common = order.common and not self._has_own_iter
        collate = None if self._has_own_iter else loader.collate_fn
        is_batched = loader.batch_sampler is not None
        self.dataset = keyed.KeyedDataset(
            loader.dataset, collate, per_sample=per_sample, is_batched=is_batched, has_epoch=trains
        )
        collated = {} if self._has_own_iter else {"collate_fn": keyed.identity}
        self._copy = copy_loader(loader, dataset=self.dataset, batch_sampler=order, **collated)
        self._here = not loader.num_workers or not order.is_own
        self._may_be_plain = type(loader) is DataLoader and not loader.num_workers and order.is_own and is_batched
        if self._may_be_plain:  # no code of the user runs, except for the dataset's
            self._here, self.dataset.keyed_isolation = False, isolated()
        self._probe: keyed.LoadProbe | None = None
        self._is_armed, self._trains = False, trains
        if share.world_size > 1:
            self.length = None if self._has_own_iter else order.length
            plain = loader.collate_fn in (default_collate, default_convert)  # another function may drop samples
            self.even = order.even and plain and not self._has_own_iter

    def open(self, reading: Reading) -> Iterator[Any]:
        keyed.set_epoch(self.loader, reading.epoch)
        is_keyed = not (self._may_be_plain and (not self._must_key(reading) or self._is_plain))
        if is_keyed:
            with isolated():
                self.dataset.keyed_generators.begin(reading.seed, reading.epoch)  # for the workers too
            self._arm(reading)
        self.order.begin(reading.seed, reading.epoch, 0 if self._has_own_iter else reading.batch)
        if not is_keyed:  # no code can draw
            return start_iterator(copy_loader(self.loader, batch_sampler=self.order), reading)
        batches = self._begun(reading, self.dataset)
        if self._has_own_iter:
            stream = OwnStream(reading.seed, reading.epoch, self.share.rank, keyed.BEGIN)
            return read_again(isolated_batches(batches, stream), reading)
        return isolated_batches(batches) if self._here else batches

    def _must_key(self, reading: Reading) -> bool:
        # Keys cost 20 microseconds a batch, and a resume that captures no generators would not be exact anyway.
        return reading.isolated or self.dataset.keyed_per_sample or self.share.world_size > 1

    def hidden(self) -> list[str]:
        return [] if self._probe is None else self._probe.read()

    @cached_property
    def _is_plain(self) -> bool:
        return keyed.is_plain_data(self.loader.dataset, self.loader.collate_fn)

    def _arm(self, reading: Reading) -> None:
        self.dataset.keyed_probe = None
        if self._is_armed or not reading.isolated or not self._trains or self.certainty() != SEEKED:
            return
        self._is_armed = True
        if not self._is_plain:
            name, workers = type(self.loader.dataset).__name__, bool(self.loader.num_workers)
            self._probe = keyed.LoadProbe(name, shared=workers)
        if reading.probes:
            self.dataset.keyed_probe = self._probe
        elif self._probe is not None:
            self._probe.leave_out(keyed.LEFT_OUT, self.dataset.keyed_generators)

    def certainty(self) -> Certainty:
        if self._has_own_iter:
            return "replayed", ()
        if self.order.unknown is not None:
            sampler = kind_of(self.order.unknown)
            return "seeked", (f"{sampler} may have hidden state: define its indices(seed, epoch, start)",)
        if self.loader.num_workers and not getattr(self.loader, "in_order", True):
            return "unknown", ("in_order=False lets workers deliver batches in any order",)
        return SEEKED


class IterableSource(Rewired):
    """A `DataLoader` of an iterable dataset: draws are keyed; a position is reached by reading again."""

    def __init__(self, loader: DataLoader[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterable", "workers": loader.num_workers}, share)
        self.batch_size = loader.batch_size
        self.dataset = keyed.KeyedIterable(loader.dataset, loader.collate_fn, loader.batch_size or 1, share.rank)
        self._copy = copy_loader(loader, dataset=self.dataset)

    def open(self, reading: Reading) -> Iterator[Any]:
        keyed.set_epoch(self.loader, reading.epoch)
        self.dataset.keyed_begin(reading.seed, reading.epoch)
        batches = self._begun(reading, self.dataset)
        if not self._copy.num_workers:
            batches = isolated_batches(batches, OwnStream(reading.seed, reading.epoch, self.share.rank, keyed.BEGIN))
        return read_again(batches, reading)

    def certainty(self) -> Certainty:
        return "replayed", ()


class OpaqueSource(Source):
    """Any other iterable of batches: a position is reached by reading again."""

    def __init__(self, loader: Iterable[Any], share: Share = ALONE) -> None:
        super().__init__(loader, {"source": "iterator", "loader": type(loader).__name__}, share)

    def open(self, reading: Reading) -> Iterator[Any]:
        keyed.set_epoch(self.loader, reading.epoch)
        if not reading.isolated:
            return read_again(iter(self.loader), reading)
        key, generators = (reading.seed, reading.epoch, self.share.rank), keyed.KeyedGenerators(self.loader)
        stream = OwnStream(*key, keyed.BEGIN)
        with stream:
            generators.seed_own(*key, keyed.BEGIN)
            batches = iter(self.loader)
        return read_again(isolated_batches(batches, stream, partial(generators.seed_own, *key)), reading)

    def certainty(self) -> Certainty:
        return "replayed", ()


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    # The user's loader is not changed.
    changed = shield_workers(loader)
    changed.__dict__.update(changes)  # a loader does not allow setting its attributes
    changed.generator = torch.Generator()  # the initial seed of a worker is drawn from it
    return changed


def start_iterator(
    loader: Iterable[Any], reading: Reading, generators: keyed.KeyedGenerators | None = None, rank: int = 0
) -> Iterator[Any]:
    # Making an iterator may draw.
    with isolated():
        if generators is not None:
            generators.seed(reading.seed, reading.epoch, rank, keyed.BEGIN)
        if isinstance(loader, DataLoader) and isinstance(loader.generator, torch.Generator) and generators is None:
            loader.generator.manual_seed((reading.seed + reading.epoch) % 2**63)
        return iter(loader)


def isolated_batches(
    batches: Iterator[Any],
    isolation: Isolation | None = None,
    seed: Callable[[int], object] | None = None,
    first: int = 0,
) -> Iterator[Any]:
    # `seed` gets the number of each batch, from `first`, before it is loaded.
    isolation = isolation or isolated()
    for batch in count(first):
        with isolation:
            if seed is not None:
                seed(batch)
            try:
                loaded = next(batches)
            except StopIteration:
                return
        yield loaded


def read_again(batches: Iterator[Any], reading: Reading) -> Iterator[Any]:
    # Replays the batches before the position.
    batch = None
    for done in range(reading.batch):
        reading.report(done, reading.batch)
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError(
                f"The train loader ended after {done} batches of epoch {reading.epoch}, but the checkpoint was written "
                f"after {reading.batch} batches. Resume with the same data."
            ) from None
    if reading.batch:
        reading.report(reading.batch, reading.batch)
        if reading.check is not None:
            reading.check(batch)
    return batches


def prepare_worker(worker_id: int, then: Callable[[int], None] | None = None) -> None:
    """Initialize a worker process: exit with the main process, and leave signals to it. A `worker_init_fn`.

    Torch's own watchdog starts only after it, and takes the parent of that moment for the main process: if the main
    process was killed before, the worker never exits.

    A cluster sends SIGTERM to the whole process group. Without this function the workers would die of it, and then the
    main process because of them, before it has saved. A SIGTERM from the main process itself ends the worker, because
    that is how it stops its workers. If the system does not report the sender of a signal (macOS, Windows), every
    SIGTERM does.

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
    # Exits when the main process has ended.
    wait([main.sentinel])
    os._exit(1)


def _obey(main: int | None) -> None:
    # Exits on a SIGTERM of the main process; ignores all others.
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(0)


def shield_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    # A copy, whose workers end with this process and leave signals to it.
    shielded = copy(loader)
    shielded.__dict__["_iterator"] = None  # persistent workers are not shared
    init = loader.worker_init_fn
    if not isinstance(init, partial) or init.func is not prepare_worker:
        shielded.worker_init_fn = partial(prepare_worker, then=init)
    return shielded
