"""One execution of a Ray dataset for all ranks, its rows dealt out to them in turn."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from ....core.system.extras import require
from ..launcher.failures import is_gone
from .columns import Columns, chosen, digest

USER = "A Ray dataset as a loader"


@dataclass(frozen=True, slots=True)
class Pass:
    """One reading of a dataset.

    Attributes:
        number: how many there were before on each rank.
        epoch: of the training; a reseeding shuffle of Ray's goes by it.
        start: the row to begin at.
        least: rows that there must be, as so many were read.
        ranks: how many the rows are dealt out to.
        run: rows that go to a rank before the next one gets some.
        fills_up: whether all ranks get equally many, some of the first rows again.
    """

    number: int
    epoch: int
    start: int
    least: int
    ranks: int
    run: int
    fills_up: bool

    def parts(self, first: int, rows: int) -> list[Any]:
        """Return which of so many rows each rank gets, the first of them being that row of all."""
        numbers = np.arange(max(first, self.start), first + rows)
        ranks = numbers // self.run % self.ranks
        return [numbers[ranks == rank] - first for rank in range(self.ranks)]


class Dealer:
    """Executes a dataset in its own order, and hands each piece of it out once.

    With several processes it is an actor beside the main rank. It only handles references then: tasks cut the blocks
    up, where these lie, so that each rank fetches no more than its rows.

    Args:
        dataset: a copy of the user's, as its options are changed.
        readers: how many processes ask.
    """

    def __init__(self, dataset: Any, readers: int) -> None:
        self._dataset, self._readers = dataset, readers
        dataset.context.execution_options.preserve_order = True
        self._lock = Lock()
        self._pass: Pass | None = None
        self._rounds: Generator[list[Any], None, None] | None = None
        self._given: dict[int, tuple[list[Any], int]] = {}  # by number of the piece, with how many have yet to ask
        self._dealt = 0
        self._first: Any = None  # the block that begins the pass
        self._failure: Exception | None = None

    def pieces(self, reading: Pass, number: int, own: Sequence[int]) -> list[Any] | None:
        """Return the parts of some ranks in the n-th piece; None where there are no more."""
        with self._lock:
            if self._pass is None or reading.number > self._pass.number:
                self._begin(reading)
            if reading != self._pass:
                return None  # of a reading that was left
            while number >= self._dealt:
                if (parts := self._next()) is None:
                    return None
                self._given[self._dealt] = parts, self._readers
                self._dealt += 1
            parts, waiting = self._given.pop(number)
            if waiting > 1:
                self._given[number] = parts, waiting - 1
            return [parts[rank] for rank in own]

    def head(self, reading: Pass) -> str | None:
        """Return what tells the first row from others; None where it is not known, or of a reading that was left."""
        with self._lock:
            block = self._first if self._pass == reading else None
        if block is None:
            return None
        [row] = self._cut(block, [np.arange(1)])
        return digest(row if self._readers == 1 else fetched(row))

    def close(self) -> None:
        """End the execution, if one is under way."""
        if self._rounds is not None:
            self._rounds.close()
        self._given.clear()

    def _next(self) -> list[Any] | None:
        """Return the next piece; an execution that has failed fails for all who ask, and is not at its end."""
        assert self._rounds is not None, "a pass was begun"
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._rounds, None)
        except require("ray.exceptions", USER, extra="ray").RayError as error:
            told = f"The Ray dataset could not be executed: {error}"
            self._failure = error if is_gone(error) else RuntimeError(told)  # a machine's fault is worth another try
        except Exception as error:  # noqa: BLE001  # raised below, and for those who ask later
            self._failure = error
        raise self._failure

    def _begin(self, reading: Pass) -> None:
        self.close()
        self._pass, self._dealt, self._first, self._failure = reading, 0, None, None
        self._dataset.context._execution_idx = reading.epoch  # what a reseeding shuffle goes by
        self._rounds = self._read(reading)

    def _read(self, reading: Pass) -> Generator[list[Any], None, None]:
        first, heads = 0, []
        with closing(self._blocks()) as blocks:
            for entry in blocks:
                rows = entry.metadata.num_rows
                assert rows is not None, "a block of an executed dataset has a known number of rows"
                if rows and first == 0:
                    self._first = entry.ref
                if rows and first < reading.ranks:
                    heads.append((first, rows, entry.ref))
                if first + rows > max(first, reading.start):
                    yield self._cut(entry.ref, reading.parts(first, rows))
                first += rows
        if first < reading.least:
            raise ValueError(
                f"The Ray dataset ended after {first} rows, of which {reading.start} had been read when the checkpoint "
                f"was written: resume with the data that it was written with."
            )
        surplus = first % reading.ranks
        if reading.fills_up and surplus and reading.start < first:
            yield self._refill([number % first for number in range(reading.ranks - surplus)], heads, surplus)

    def _blocks(self) -> Generator[Any, None, None]:
        """Execute; the execution ends with this iterator, which nothing public of Ray's sees to in a known moment."""
        bundles, _, executor = self._dataset.iterator()._to_ref_bundle_iterator()
        try:
            for bundle in bundles:
                yield from bundle.blocks
        finally:
            if executor is not None:
                executor.shutdown(force=True)

    def _refill(self, numbers: list[int], heads: list[tuple[int, int, Any]], surplus: int) -> list[Any]:
        """Return a row from the beginning for each rank that has one less than the others."""
        parts: list[Any] = [None] * surplus
        for number in numbers:
            first, _, block = next(each for each in heads if number < each[0] + each[1])
            parts += self._cut(block, [np.array([number - first])])
        return parts

    def _cut(self, block: Any, rows: list[Any]) -> list[Any]:
        ray = require("ray", USER, extra="ray")
        if self._readers == 1:
            return cut(ray.get(block), rows)
        if len(rows) == 1:
            return [ray.remote(cut_one).options(num_cpus=0).remote(block, rows)]
        parts: list[Any] = ray.remote(cut).options(num_cpus=0, num_returns=len(rows)).remote(block, rows)
        return parts


def cut(block: Any, rows: list[Any]) -> list[Columns]:
    """Return some rows of a block for each rank."""
    columns = columns_of(block)
    return [chosen(columns, each) for each in rows]


def cut_one(block: Any, rows: list[Any]) -> Columns:
    """Return some rows of a block for one rank: what a task returns for several would be a list for one."""
    return cut(block, rows)[0]


def columns_of(block: Any) -> Columns:
    """Return all rows of a block."""
    accessor = require("ray.data.block", USER, extra="ray").BlockAccessor
    columns: Columns = accessor.for_block(block).to_numpy()
    return columns


def fetched(reference: Any) -> Any:
    """Return what a reference stands for; raise what its task raised, as itself, so that it can be told elsewhere."""
    error = require("ray.exceptions", USER, extra="ray").RayTaskError
    try:
        return require("ray", USER, extra="ray").get(reference)
    except error as failed:
        raise failed.cause from None
