"""One execution of a Ray dataset for all ranks, among which its rows are distributed in turn."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from heliograph.spi import require

from ..launcher.failures import is_process_loss
from .columns import Columns, digest, select_rows

PURPOSE = "A Ray dataset as a loader"


@dataclass(frozen=True, slots=True)
class DatasetPass:
    """One pass over a dataset.

    Attributes:
        number: counted from 1 on each rank.
        epoch: of the training; the seed of Ray's reseeding shuffles depends on it.
        start: the first row to read.
        min_rows: the rows that the dataset has at least, because they were read before.
        ranks: the number of ranks.
        turn: rows that a rank gets before the next rank gets some.
        fills_up: whether all ranks get equally many rows, some of the first ones twice.
    """

    number: int
    epoch: int
    start: int
    min_rows: int
    ranks: int
    turn: int
    fills_up: bool

    def parts(self, first: int, rows: int) -> list[Any]:
        """Return, for each rank, the indices of its rows in a block that has `rows` rows and starts at row `first`."""
        numbers = np.arange(max(first, self.start), first + rows)
        ranks = numbers // self.turn % self.ranks
        return [numbers[ranks == rank] - first for rank in range(self.ranks)]


class RowDistributor:
    """Executes a dataset in its own order, and distributes its rows among the ranks, block by block.

    With several processes it is an actor on the main rank's node, which only handles references: tasks split the blocks
    on the nodes that hold them, so that each rank fetches its own rows only.

    Args:
        dataset: a copy of the user's, because its options are changed.
        readers: the number of processes that read.
    """

    def __init__(self, dataset: Any, readers: int) -> None:
        self._dataset, self._readers = dataset, readers
        dataset.context.execution_options.preserve_order = True
        self._lock = Lock()
        self._pass: DatasetPass | None = None
        self._rounds: Generator[list[Any], None, None] | None = None
        self._pieces: dict[int, tuple[list[Any], int]] = {}  # by number, with the count of readers yet to come
        self._count = 0  # of pieces so far
        self._first: Any = None  # the first block of the pass
        self._failure: Exception | None = None

    def read_piece(self, dataset_pass: DatasetPass, number: int, rank: int) -> list[Any] | None:
        """Return the rows of a rank in a piece, which is a block, as the one item of a list; None after the last."""
        with self._lock:
            if self._pass is None or dataset_pass.number > self._pass.number:
                self._start(dataset_pass)
            if dataset_pass != self._pass:
                return None  # of a pass that was abandoned
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
        """Return a digest of the first row; None if it is not known yet, or the pass was abandoned."""
        with self._lock:
            block = self._first if self._pass == dataset_pass else None
        if block is None:
            return None
        [row] = self._split(block, [np.arange(1)])
        return digest(row if self._readers == 1 else get_object(row))

    def close(self) -> None:
        """End the execution, if there is one."""
        if self._rounds is not None:
            self._rounds.close()
        self._pieces.clear()

    def _next(self) -> list[Any] | None:
        """Return the next piece, None after the last; after a failure raise the same error for each reader."""
        assert self._rounds is not None, "a pass was started"
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._rounds, None)
        except require("ray.exceptions", PURPOSE, extra="ray").RayError as error:
            message = f"The Ray dataset could not be executed: {error}"
            # Ray's own error of a lost process lets the launcher make another attempt.
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
                f"was written: resume with the data that it was written with."
            )
        surplus = first % dataset_pass.ranks
        if dataset_pass.fills_up and surplus and dataset_pass.start < first:
            yield self._fill_up([number % first for number in range(dataset_pass.ranks - surplus)], heads, surplus)

    def _blocks(self) -> Generator[Any, None, None]:
        """Execute the dataset; end the execution when this iterator is closed, for which Ray has no public way."""
        bundles, _, executor = self._dataset.iterator()._to_ref_bundle_iterator()
        try:
            for bundle in bundles:
                yield from bundle.blocks
        finally:
            if executor is not None:
                executor.shutdown(force=True)

    def _fill_up(self, numbers: list[int], heads: list[tuple[int, int, Any]], surplus: int) -> list[Any]:
        """Return one of the first rows for each rank that has one row less than the others."""
        parts: list[Any] = [None] * surplus
        for number in numbers:
            first, _, block = next(each for each in heads if number < each[0] + each[1])
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
    """Return the rows of a block for each rank, by their indices."""
    columns = block_columns(block)
    return [select_rows(columns, each) for each in rows]


def take_one(block: Any, rows: list[Any]) -> Columns:
    """Return the rows of a block for a single rank: a task with one return value would return a list."""
    return split(block, rows)[0]


def block_columns(block: Any) -> Columns:
    """Return all rows of a block."""
    accessor = require("ray.data.block", PURPOSE, extra="ray").BlockAccessor
    columns: Columns = accessor.for_block(block).to_numpy()
    return columns


def get_object(reference: Any) -> Any:
    """Return the object of a reference; raise what its task raised, without Ray's wrapper."""
    error = require("ray.exceptions", PURPOSE, extra="ray").RayTaskError
    try:
        return require("ray", PURPOSE, extra="ray").get(reference)
    except error as failed:
        raise failed.cause from None
