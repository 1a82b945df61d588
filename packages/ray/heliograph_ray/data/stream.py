"""A Ray dataset that is executed while it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count
from typing import Any

from heliograph.core.data.generators import isolated
from heliograph.core.data.keyed import KeyedGenerators
from heliograph.core.data.sizes import Share
from heliograph.core.data.source import Reading, Source, Sourced
from heliograph.events import Engine, Position
from heliograph.spi import require

from .distributor import (
    PURPOSE,
    Columns,
    DatasetPass,
    RowDistributor,
    concatenate,
    copy_dataset,
    get_object,
    kill_distributor,
    length,
    make_batcher,
    select_rows,
    start_shared_distributor,
)

PREFETCH = 2  # pieces that a process requests before it needs them


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
        self._collate, self._generators = (
            make_batcher(loader.columns, loader.collate_fn),
            KeyedGenerators(loader.collate_fn),
        )
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
            kill_distributor(self._distributor)
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
                self._compare_head(dataset_pass)
            yield rows

    def _compare_head(self, dataset_pass: DatasetPass) -> None:
        distributor = self._distributor
        if self.share.world_size == 1:
            head = distributor.digest_first_row(dataset_pass)
        else:
            head = get_object(distributor.digest_first_row.remote(dataset_pass))
        self._has_changed = self._has_changed or self._expected not in (None, head)
        self._head, self._expected = head, None

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
            self._distributor = start_shared_distributor(self._dataset, self._engine, prefetch=PREFETCH)
