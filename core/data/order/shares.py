"""Which part of an epoch a process reads, and what a position amid it means to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one process in an order that several read together.

    Attributes:
        rank: this process among `world_size`, from 0.
        world_size: how many processes read.
        ranks: how many ranks the order is dealt out to: as many as there are processes, or a multiple, which these
            then stand in for.
    """

    rank: int = 0
    world_size: int = 1
    ranks: int = 1

    @property
    def own(self) -> range:
        """The ranks whose batches this process reads in turn; the turns of all processes together go up by rank."""
        return range(self.rank, self.ranks, self.world_size)

    @property
    def turns(self) -> int:
        """How many ranks this process stands in for."""
        return self.ranks // self.world_size


ALONE = Share()


@dataclass(frozen=True, slots=True)
class Layout:
    """How an epoch lies in the batches of several processes.

    Attributes:
        world_size: how many processes read.
        ranks: how many ranks the order is dealt out to; see `Share`.
        batch_size: what a batch takes of that order: its samples, or 1 where whole batches are dealt out; None where
            nobody knows.
        batches: of an epoch, on each process; None where nobody knows.
        common: whether all ranks share one order; else each reads its own, and nobody knows what the others have read.
    """

    world_size: int
    ranks: int
    batch_size: int | None
    batches: int | None
    common: bool

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return asdict(self)

    def is_read_alike(self, other: Layout) -> bool:
        """Return whether as many processes read as as many ranks."""
        return (self.world_size, self.ranks) == (other.world_size, other.ranks)

    def deals_alike(self, other: Layout) -> bool:
        """Return whether the same samples meet in the same batches, under the same keys."""
        return (self.ranks, self.batch_size) == (other.ranks, other.batch_size)


def converted(progress: Mapping[str, Any], before: Layout, now: Layout) -> dict[str, Any]:
    """Return the counters of a saved run as those of a run in another layout.

    The position is the same to the sample. Batches of earlier epochs are counted as if these had been read in the
    layout of now; where nobody knows how many that were, to the nearest.

    Args:
        progress: the saved counters.
        before: the layout that they were counted in.
        now: the layout of the run that goes on.

    Raises:
        ValueError: no batch of the present layout begins at the position.
    """
    counters = dict(progress)
    if before.is_read_alike(now):
        return counters
    if not (before.common and now.common):
        if progress["batch"]:
            raise ValueError(
                f"{before.world_size} processes wrote the checkpoint amid an epoch, each at a position in an order of "
                f"its own, which {now.world_size} cannot take up: resume with as many, or from a checkpoint at an "
                f"epoch's end."
            )
        return counters
    counters["batch"] = _batch(progress["batch"], before, now)
    epochs, factor = progress["epoch"], _taken(before) / _taken(now)
    if before.batches and now.batches and progress["earlier_batches"] == epochs * before.batches:
        counters["earlier_batches"] = epochs * now.batches
    else:
        counters["earlier_batches"] = round(progress["earlier_batches"] * factor)
    counters["skipped_batches"] = round(progress["skipped_batches"] * factor)
    return counters


def _taken(layout: Layout) -> int:
    """Return what the batches of all processes take of the order."""
    return layout.world_size * (layout.batch_size or 1)


def _batch(batch: int, before: Layout, now: Layout) -> int:
    if before.batches is not None and now.batches is not None and batch >= before.batches:
        return now.batches
    position = batch * _taken(before)
    count, rest = divmod(position, _taken(now))
    mixed = not before.deals_alike(now)
    if rest or (mixed and (batch * before.world_size % before.ranks or count * now.world_size % now.ranks)):
        raise ValueError(
            f"The checkpoint stands {position} samples into the epoch, amid a batch of now: {_told(now)}. It was "
            f"written by {_told(before)}. Choose numbers whose product is the same, or divides {position}; or resume "
            f"from a checkpoint at an epoch's end."
        )
    return count


def _told(layout: Layout) -> str:
    ranks = "" if layout.ranks == layout.world_size else f" as {layout.ranks} ranks"
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    return f"{processes}{ranks} x batch_size {layout.batch_size}"
