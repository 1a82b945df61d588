"""Distribution of the rows of one Ray dataset among all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from heliograph.events import Engine
from heliograph.spi import require
from torch import Tensor

from ..launcher.failures import is_process_loss

Columns = dict[str, np.ndarray[Any, Any]]
Batch = dict[str, Tensor] | list[Tensor]

PURPOSE = "A Ray dataset as a loader"
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


def start_shared_distributor(dataset: Any, engine: Engine, *, prefetch: int) -> Any:
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
        options = {"name": name, "num_cpus": 0, "max_concurrency": prefetch * engine.world_size}
        kind = ray.remote(RowDistributor).options(scheduling_strategy=own_node, **options)
        actor = kind.remote(dataset, engine.world_size)
    name, namespace = engine.broadcast((name, context.namespace))
    return ray.get_actor(name, namespace) if actor is None else actor


def kill_distributor(distributor: Any) -> None:
    ray = require("ray", PURPOSE, extra="ray")
    if ray.is_initialized():
        ray.kill(distributor)


def warn_if_full() -> None:
    if not require("ray", PURPOSE, extra="ray").available_resources().get("CPU", 0):
        logger.warning(
            "No CPU of the Ray cluster is free, so a Ray dataset waits for one: give the workers fewer CPUs "
            "(resources_per_worker), or the cluster more."
        )
