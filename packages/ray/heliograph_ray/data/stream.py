"""A Ray dataset that is executed while it is read; its rows are distributed among all ranks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from threading import Lock
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from heliograph.core.data.generators import isolated
from heliograph.core.data.keyed import KeyedGenerators
from heliograph.core.data.sizes import Share
from heliograph.core.data.source import Reading, Source, Sourced
from heliograph.events import Engine, Position
from heliograph.spi import require
from torch import Tensor

from ..launcher.failures import is_process_loss

Columns = dict[str, np.ndarray[Any, Any]]
Batch = dict[str, Tensor] | list[Tensor]

PURPOSE = "A Ray dataset as a loader"
PREFETCH = 2  # pieces that a process requests before it needs them
logger = logging.getLogger("heliograph")


def length(columns: Columns) -> int:
    return len(next(iter(columns.values()))) if columns else 0


def select_rows(columns: Columns, rows: Any) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def concatenate(pieces: Sequence[Columns]) -> Columns:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def make_batcher(names: Sequence[str] | None, collate_fn: Callable[[Any], Any] | None) -> Callable[[Columns], Any]:
    return partial(_tensors, names=names) if collate_fn is None else collate_fn


def digest(columns: Columns) -> str:
    hasher = blake2b(digest_size=8)
    for name, values in sorted(columns.items()):
        hasher.update(f"{name} {values.dtype} {values.shape}".encode())
        hasher.update(repr(values.tolist()).encode() if values.dtype.hasobject else np.ascontiguousarray(values).data)
    return hasher.hexdigest()


def _tensors(columns: Columns, names: Sequence[str] | None) -> Batch:
    tensors = {name: _tensor(name, values) for name, values in columns.items()}
    return tensors if names is None else [tensors[name] for name in names]


def _tensor(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    if values.dtype.kind not in "biufc":
        raise TypeError(
            f"Column {name!r} of the Ray dataset has the dtype {values.dtype}, which tensors do not support: select "
            f"columns with loader_params={{'columns': ['x', 'y']}}, or pass a collate_fn, which gets them as arrays."
        )
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # Ray's own memory is read-only


@dataclass(frozen=True, slots=True)
class DatasetPass:
    """One pass over a dataset.

    Attributes:
        number: counted from 1 on each rank.
        epoch: the epoch of the training; seeds Ray's reseeding shuffles.
        start: the first row to read.
        min_rows: the minimum number of rows, because they were read before the resume.
        ranks: the number of ranks.
        turn: the number of consecutive rows of one rank.
        fills_up: whether all ranks get the same number of rows, by repeating some of the first rows.
    """

    number: int
    epoch: int
    start: int
    min_rows: int
    ranks: int
    turn: int
    fills_up: bool

    def parts(self, first: int, rows: int) -> list[Any]:
        numbers = np.arange(max(first, self.start), first + rows)
        ranks = numbers // self.turn % self.ranks
        return [numbers[ranks == rank] - first for rank in range(self.ranks)]


class RowDistributor:
    """Executes a dataset in its own order, and distributes its rows among the ranks block by block.

    With several processes it is an actor on the main rank's node that only handles references: tasks split the blocks
    on the nodes that store them, so each rank fetches only its own rows.

    Args:
        dataset: a copy of the user's dataset, because its options are changed.
        readers: the number of processes that read.
    """

    def __init__(self, dataset: Any, readers: int) -> None:
        self._dataset, self._readers = dataset, readers
        dataset.context.execution_options.preserve_order = True
        self._lock = Lock()
        self._pass: DatasetPass | None = None
        self._rounds: Generator[list[Any], None, None] | None = None
        self._pieces: dict[int, tuple[list[Any], int]] = {}  # by number, with the number of ranks yet to read it
        self._count = 0  # pieces so far
        self._first: Any = None  # the first block of the pass
        self._failure: Exception | None = None

    def read_piece(self, dataset_pass: DatasetPass, number: int, rank: int) -> list[Any] | None:
        """Return the rank's rows of a block as a list of one item; None after the last block."""
        with self._lock:
            if self._pass is None or dataset_pass.number > self._pass.number:
                self._start(dataset_pass)
            if dataset_pass != self._pass:
                return None  # the pass was abandoned
            while number >= self._count:
                if (parts := self._next()) is None:
                    return None
                self._pieces[self._count] = parts, self._readers
                self._count += 1
            parts, readers = self._pieces.pop(number)
            if readers > 1:
                self._pieces[number] = parts, readers - 1
            return [parts[rank]]

    def digest_first_row(self, dataset_pass: DatasetPass) -> str | None:
        with self._lock:
            block = self._first if self._pass == dataset_pass else None
        if block is None:
            return None
        [row] = self._split(block, [np.arange(1)])
        return digest(row if self._readers == 1 else get_object(row))

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        self._pieces.clear()

    def _next(self) -> list[Any] | None:
        assert self._rounds is not None, "a pass was started"
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._rounds, None)
        except require("ray.exceptions", PURPOSE, extra="ray").RayError as error:
            message = f"The Ray dataset could not be executed: {error}"
            # The launcher starts another attempt after Ray's own error for a lost process.
            self._failure = error if is_process_loss(error) else RuntimeError(message)
        except Exception as error:  # noqa: BLE001  # raised below, and for later readers
            self._failure = error
        raise self._failure

    def _start(self, dataset_pass: DatasetPass) -> None:
        self.close()
        self._pass, self._count, self._first, self._failure = dataset_pass, 0, None, None
        self._dataset.context._execution_idx = dataset_pass.epoch  # reseeding shuffles depend on it
        self._rounds = self._read(dataset_pass)

    def _read(self, dataset_pass: DatasetPass) -> Generator[list[Any], None, None]:
        first, heads = 0, []
        with closing(self._blocks()) as blocks:
            for entry in blocks:
                rows = entry.metadata.num_rows
                assert rows is not None, "a block of an executed dataset has a known number of rows"
                if rows and first == 0:
                    self._first = entry.ref
                if rows and first < dataset_pass.ranks:
                    heads.append((first, rows, entry.ref))
                if first + rows > max(first, dataset_pass.start):
                    yield self._split(entry.ref, dataset_pass.parts(first, rows))
                first += rows
        if first < dataset_pass.min_rows:
            raise ValueError(
                f"The Ray dataset ended after {first} rows, but {dataset_pass.start} had been read when the checkpoint "
                f"was written: resume with the same data."
            )
        surplus = first % dataset_pass.ranks
        if dataset_pass.fills_up and surplus and dataset_pass.start < first:
            yield self._fill_up([number % first for number in range(dataset_pass.ranks - surplus)], heads, surplus)

    def _blocks(self) -> Generator[Any, None, None]:
        bundles, _, executor = self._dataset.iterator()._to_ref_bundle_iterator()
        try:
            for bundle in bundles:
                yield from bundle.blocks
        finally:
            if executor is not None:
                executor.shutdown(force=True)

    def _fill_up(self, numbers: list[int], heads: list[tuple[int, int, Any]], surplus: int) -> list[Any]:
        parts: list[Any] = [None] * surplus
        for number in numbers:
            first, _, block = next(head for head in heads if number < head[0] + head[1])
            parts += self._split(block, [np.array([number - first])])
        return parts

    def _split(self, block: Any, rows: list[Any]) -> list[Any]:
        ray = require("ray", PURPOSE, extra="ray")
        if self._readers == 1:
            return split(ray.get(block), rows)
        if len(rows) == 1:
            return [ray.remote(take_one).options(num_cpus=0).remote(block, rows)]
        parts: list[Any] = ray.remote(split).options(num_cpus=0, num_returns=len(rows)).remote(block, rows)
        return parts


def split(block: Any, rows: list[Any]) -> list[Columns]:
    columns = block_columns(block)
    return [select_rows(columns, indices) for indices in rows]


def take_one(block: Any, rows: list[Any]) -> Columns:
    """Return the rows of a single rank: a Ray task with one return value would return a list."""
    return split(block, rows)[0]


def block_columns(block: Any) -> Columns:
    accessor = require("ray.data.block", PURPOSE, extra="ray").BlockAccessor
    columns: Columns = accessor.for_block(block).to_numpy()
    return columns


def get_object(reference: Any) -> Any:
    error = require("ray.exceptions", PURPOSE, extra="ray").RayTaskError
    try:
        return require("ray", PURPOSE, extra="ray").get(reference)
    except error as failed:
        raise failed.cause from None


def copy_dataset(dataset: Any) -> Any:
    ray = require("ray", PURPOSE, extra="ray")
    return ray.get(ray.put(dataset))


def start_shared_distributor(dataset: Any, engine: Engine) -> Any:
    ray = require("ray", PURPOSE, extra="ray")
    if not ray.is_initialized():
        raise RuntimeError(
            "This process is not connected to Ray, so it cannot read a Ray dataset: start the ranks with RayLauncher, "
            "or call ray.init(address=...) in each of them."
        )
    context, actor = ray.get_runtime_context(), None
    name = f"heliograph-{uuid4()}"
    if engine.is_main:
        warn_if_full()
        strategies = require("ray.util.scheduling_strategies", PURPOSE, extra="ray")
        own_node = strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "max_concurrency": PREFETCH * engine.world_size}
        kind = ray.remote(RowDistributor).options(scheduling_strategy=own_node, **options)
        actor = kind.remote(dataset, engine.world_size)
    name, namespace = engine.broadcast((name, context.namespace))
    return ray.get_actor(name, namespace) if actor is None else actor


def warn_if_full() -> None:
    if not require("ray", PURPOSE, extra="ray").available_resources().get("CPU", 0):
        logger.warning(
            "No CPU of the Ray cluster is free, so a Ray dataset waits for one: give the workers fewer CPUs "
            "(resources_per_worker), or the cluster more."
        )


def find_unseeded(dataset: Any) -> str | None:
    for operator in dataset._logical_plan.dag.post_order_iter():
        if any(config is not None and getattr(config, "seed", None) is None for config in _configs(operator)):
            return str(operator.name)
    return None


def _configs(operator: Any) -> Iterator[Any]:
    data = require("ray.data", PURPOSE, extra="ray")
    yield getattr(operator, "seed_config", None)
    for argument in getattr(operator, "fn_args", None) or ():
        yield argument if isinstance(argument, data.RandomSeedConfig) else None
    yield getattr(getattr(operator, "datasource", None), "_shuffle", None)
    files = getattr(operator, "shuffle_config_factory", lambda: None)
    first, second = files(), files()
    yield first if first == second else "files"


class RayStream(Sourced):
    """A loader of a Ray dataset that is not materialized.

    Args:
        dataset: the user's dataset.
        batch_size: samples in a batch, per rank.
        drop_last: whether to drop a smaller last batch.
        columns: the columns of a batch, in order; None for a dict of all columns.
        collate_fn: makes a batch from arrays by column; None for tensors.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        drop_last: bool,
        columns: Sequence[str] | None,
        collate_fn: Callable[[Columns], Any] | None,
    ) -> None:
        self.dataset = dataset if columns is None else dataset.select_columns(list(columns))
        self.batch_size, self.drop_last, self.columns, self.collate_fn = batch_size, drop_last, columns, collate_fn

    def __iter__(self) -> Iterator[Any]:
        reading = Reading(seed=0, epoch=0, batch=0, isolated=False, report=lambda *_: None)
        return self.source(Share(), None, fills_up=False).open(reading)

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> StreamSource:
        return StreamSource(self, share, engine, fills_up=fills_up)


class StreamSource(Source):
    """The source of a stream: rows are distributed in the same order for any number of ranks.

    A position is reached by executing the dataset again; earlier rows are not fetched.

    Args:
        loader: the loader of the user's dataset.
        share: the share of this process.
        engine: connects several processes.
        fills_up: whether to distribute single rows and give all ranks the same number, by repeating some of the first
            rows; otherwise whole batches are distributed, and each row is read once.
    """

    as_it_is, common = False, True

    def __init__(self, loader: RayStream, share: Share, engine: Engine | None, *, fills_up: bool) -> None:
        columns = None if loader.columns is None else list(loader.columns)
        kind = {"source": "ray", "columns": columns, "drop_last": loader.drop_last}
        super().__init__(loader, kind if loader.collate_fn is None else {**kind, "draws_per": "batch"}, share)
        self.batch_size = self._size = loader.batch_size
        self._dataset, self._fills_up, self._engine = loader.dataset, fills_up, engine
        self._collate = make_batcher(loader.columns, loader.collate_fn)
        self._generators = KeyedGenerators(loader.collate_fn)
        self._unseeded = find_unseeded(loader.dataset)
        self._distributor: Any = None
        self._passes = 0
        self._head: str | None = None  # the digest of the epoch's first row
        self._expected: str | None = None  # the same, in the checkpoint
        self._has_changed = False

    def certainty(self) -> tuple[Position, tuple[str, ...]]:
        if self._unseeded is not None:
            return "unknown", (f"{self._unseeded} in the Ray dataset has no seed: its order differs each time",)
        if self._has_changed:
            return "unknown", ("the Ray dataset had a different order or different rows when it was resumed",)
        return "replayed", ()

    def open(self, reading: Reading) -> Iterator[Any]:
        self._passes += 1
        if reading.is_over:
            return iter(())
        self._connect()
        dataset_pass = self._make_pass(reading.epoch, reading.batch)
        batches = self._rows(self._check_head(self._pieces(dataset_pass), dataset_pass))
        context = isolated if reading.isolated else nullcontext
        if reading.batch:
            reading.report(0, reading.batch)
            with context():
                batches = chain([batch for batch in [next(batches, None)] if batch is not None], batches)
            reading.report(reading.batch, reading.batch)
        return self._batches(batches, reading, context)

    def state_dict(self, batch: int) -> dict[str, Any]:
        return {"head": self._head if batch else None, "has_changed": self._has_changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._head = self._expected = state["head"]
        self._has_changed = state["has_changed"]

    def close(self) -> None:
        if isinstance(self._distributor, RowDistributor):
            self._distributor.close()
        elif self._distributor is not None and self._engine is not None and self._engine.is_main:
            ray = require("ray", PURPOSE, extra="ray")
            if ray.is_initialized():
                ray.kill(self._distributor)
        self._distributor = None

    def _make_pass(self, epoch: int, done: int) -> DatasetPass:
        ranks, size = self.share.world_size, self._size
        consumed = done * ranks * size
        min_rows = (done - 1) * ranks * size + 1 if done else 0
        turn, fills_up = 1 if self._fills_up else size, self._fills_up and not self.loader.drop_last
        return DatasetPass(self._passes, epoch, consumed, min_rows, ranks, turn, fills_up)

    def _pieces(self, dataset_pass: DatasetPass) -> Iterator[Columns | None]:
        rank, distributor = self.share.rank, self._distributor
        if self.share.world_size == 1:
            for number in count():
                if (parts := distributor.read_piece(dataset_pass, number, rank)) is None:
                    return
                yield parts[0]
        requests = deque(distributor.read_piece.remote(dataset_pass, number, rank) for number in range(PREFETCH))
        for number in count(PREFETCH):
            parts = get_object(requests.popleft())
            if parts is None:
                return
            requests.append(distributor.read_piece.remote(dataset_pass, number, rank))
            yield None if parts[0] is None else get_object(parts[0])

    def _check_head(self, pieces: Iterator[Columns | None], dataset_pass: DatasetPass) -> Iterator[Columns | None]:
        for number, rows in enumerate(pieces):
            if number == 0 and self._fills_up:
                if self.share.world_size == 1:
                    head = self._distributor.digest_first_row(dataset_pass)
                else:
                    head = get_object(self._distributor.digest_first_row.remote(dataset_pass))
                self._has_changed = self._has_changed or self._expected not in (None, head)
                self._head, self._expected = head, None
            yield rows

    def _rows(self, pieces: Iterator[Columns | None]) -> Iterator[Columns]:
        parts: list[Columns] = []
        missing = self._size
        for piece in pieces:
            start = 0
            while piece is not None and start < length(piece):
                parts.append(select_rows(piece, slice(start, start + missing)))
                start += length(parts[-1])
                missing -= length(parts[-1])
                if missing == 0:
                    yield concatenate(parts)
                    parts, missing = [], self._size
        if parts and not self.loader.drop_last:
            yield concatenate(parts)

    def _batches(
        self, batches: Iterator[Columns], reading: Reading, context: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[Any]:
        for number in count(reading.batch):
            with context():
                rows = next(batches, None)
                if rows is None:
                    return
                if reading.isolated:
                    self._generators.seed(reading.seed, reading.epoch, number, self.share.rank)
                batch = self._collate(rows)
            yield batch

    def _connect(self) -> None:
        if self._distributor is None and self.share.world_size == 1:
            self._distributor = RowDistributor(copy_dataset(self._dataset), 1)
        elif self._distributor is None:
            assert self._engine is not None, "several processes are connected by an engine"
            self._distributor = start_shared_distributor(self._dataset, self._engine)
