"""A Ray dataset that is executed as it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count
from typing import Any

from ....core.data.draws.generators import isolated
from ....core.data.draws.held_generators import Held
from ....core.data.order.shares import ALONE, Share
from ....core.data.sources.contract import Sourced
from ....core.data.sources.stateless import Reading, Stateless, Worth
from ....events import Engine
from .columns import Columns, Gathered, batcher
from .dealt_rows import Dealer, Pass, fetched
from .execution import copied, end_shared, shared_dealer
from .seeds import unseeded

AHEAD = 2  # pieces that a process asks for before it needs them


class RayStream(Sourced):
    """A loader of a Ray dataset that is not materialized.

    Args:
        dataset: the user's.
        batch_size: rows in a batch, per rank.
        drop_last: whether a last, smaller batch is left out.
        columns: what a batch holds, in order; None for a dict of all.
        collate_fn: makes a batch of arrays by column; None for tensors.
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
        reading = Reading(seed=0, epoch=0, batch=0, apart=False, report=_nobody)
        return self.source(ALONE, None, fills_up=False).open(reading)

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> StreamSource:
        """Return what reads the share of a process."""
        return StreamSource(self, share, engine, fills_up=fills_up)


class StreamSource(Stateless):
    """What reads a stream: its rows are dealt out in turn, in one order for any number of ranks.

    A position is reached by executing the dataset again; of what lies before it nothing is fetched.

    Args:
        loader: made of the user's dataset.
        share: the part of this process.
        engine: connects several processes.
        fills_up: whether rows are dealt out one by one, and all ranks get equally many, some of the first ones again;
            else it is whole batches that are, and each row is read once.
    """

    as_it_is, common = False, True

    def __init__(self, loader: RayStream, share: Share, engine: Engine | None, *, fills_up: bool) -> None:
        columns = None if loader.columns is None else list(loader.columns)
        kind = {"source": "ray", "columns": columns, "drop_last": loader.drop_last}
        super().__init__(loader, kind if loader.collate_fn is None else {**kind, "draws_per": "batch"}, share)
        self.batch_size = self._size = loader.batch_size
        self._dataset, self._fills_up, self._engine = loader.dataset, fills_up, engine
        self._collate, self._held = batcher(loader.columns, loader.collate_fn), Held(loader.collate_fn)
        self._unseeded = unseeded(loader.dataset)
        self._dealer: Any = None
        self._opened = 0
        self._head: str | None = None
        self._expected: str | None = None
        self._has_changed = False

    def worth(self) -> Worth:
        """Say that it is executed again, and whether the order is the same then."""
        if self._unseeded is not None:
            return "not exact", (f"{self._unseeded} in the Ray dataset has no seed: it gives another order each time",)
        if self._has_changed:
            return "not exact", ("the Ray dataset came in another order, or with other rows, when it was resumed",)
        return "replayed", (
            "a Ray dataset is executed again up to the position: in the same order, if its files and functions repeat "
            "themselves (ds.materialize() is entered anywhere)",
        )

    def open(self, reading: Reading) -> Iterator[Any]:
        """Execute it, from the position on."""
        self._opened += 1
        if reading.is_over:
            return iter(())
        self._connect()
        order = self._pass(reading.epoch, reading.batch // self.share.turns)
        rounds = self._rounds(self._compared(self._pieces(order), order))
        aside = isolated() if reading.apart else nullcontext()
        if reading.batch:
            reading.report(0, reading.batch)
            with aside:
                rounds = chain([each for each in [next(rounds, None)] if each is not None], rounds)
            reading.report(reading.batch, reading.batch)
        return self._batches(rounds, reading, aside)

    def state_dict(self, *, between_epochs: bool) -> dict[str, Any]:
        """Return what the epoch began with: one that is executed again should begin alike."""
        return {"head": None if between_epochs else self._head, "has_changed": self._has_changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what the epoch began with."""
        self._head = self._expected = state["head"]
        self._has_changed = state["has_changed"]

    def close(self) -> None:
        """End the execution; the main rank ends the actor for all, as nobody reads any more."""
        if isinstance(self._dealer, Dealer):
            self._dealer.close()
        elif self._dealer is not None and self._engine is not None and self._engine.is_main:
            end_shared(self._dealer)
        self._dealer = None

    def _pass(self, epoch: int, done: int) -> Pass:
        ranks, size = self.share.ranks, self._size
        consumed = done * ranks * size
        least = (done - 1) * ranks * size + 1 if done else 0
        run, fills_up = 1 if self._fills_up else size, self._fills_up and not self.loader.drop_last
        return Pass(self._opened, epoch, consumed, least, ranks, run, fills_up)

    def _pieces(self, order: Pass) -> Iterator[list[Columns | None]]:
        """Yield the parts of this process's ranks, one piece of the dataset after the other."""
        own, dealer = list(self.share.own), self._dealer
        if self.share.world_size == 1:
            numbers = count()
            yield from iter(lambda: dealer.pieces(order, next(numbers), own), None)
            return
        asked = deque(dealer.pieces.remote(order, number, own) for number in range(AHEAD))
        for number in count(AHEAD):
            parts = fetched(asked.popleft())
            if parts is None:
                return
            asked.append(dealer.pieces.remote(order, number, own))
            yield [None if part is None else fetched(part) for part in parts]

    def _compared(self, pieces: Iterator[list[Columns | None]], order: Pass) -> Iterator[list[Columns | None]]:
        """Yield them all; once the first is there, see what the epoch of a training began with."""
        for number, parts in enumerate(pieces):
            if number == 0 and self._fills_up:
                self._note_head(order)
            yield parts

    def _note_head(self, order: Pass) -> None:
        alone, dealer = self.share.world_size == 1, self._dealer
        head = dealer.head(order) if alone else fetched(dealer.head.remote(order))
        self._has_changed = self._has_changed or self._expected not in (None, head)
        self._head, self._expected = head, None

    def _rounds(self, pieces: Iterator[list[Columns | None]]) -> Iterator[list[Columns]]:
        """Yield the rows of a batch for each of this process's ranks."""
        ranks = [Gathered() for _ in self.share.own]
        for parts in pieces:
            for rank, part in zip(ranks, parts, strict=True):
                rank.add(part)
            while all(rank.rows >= self._size for rank in ranks):
                yield [rank.take(self._size) for rank in ranks]
        if not self.loader.drop_last and all(rank.rows for rank in ranks):
            yield [rank.take(self._size) for rank in ranks]

    def _batches(
        self, rounds: Iterator[list[Columns]], reading: Reading, aside: AbstractContextManager[object]
    ) -> Iterator[Any]:
        first, turn = divmod(reading.batch, self.share.turns)
        for number in count(first):
            with aside:
                parts = next(rounds, None)
            if parts is None:
                return
            for rank, rows in list(zip(self.share.own, parts, strict=True))[turn:]:
                with aside:
                    if reading.apart:
                        self._held.seed(reading.seed, reading.epoch, number, rank)
                    batch = self._collate(rows)
                yield batch
            turn = 0

    def _connect(self) -> None:
        """Find what executes the dataset; on several ranks, the first time, this is a collective."""
        if self._dealer is None and self.share.world_size == 1:
            self._dealer = Dealer(copied(self._dataset), 1)
        elif self._dealer is None:
            assert self._engine is not None, "several processes are connected by an engine"
            self._dealer = shared_dealer(self._dataset, self._engine, asking=AHEAD)


def _nobody(done: int, batches: int) -> None:
    """Hear nothing: it begins at the first batch."""
