"""Which part of an epoch a process reads, and how an epoch lies in the batches of all processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one process in an order that several read together.

    Attributes:
        rank: this process among `world_size`, from 0.
        world_size: how many processes read.
    """

    rank: int = 0
    world_size: int = 1


ALONE = Share()


@dataclass(frozen=True, slots=True)
class Layout:
    """How an epoch lies in the batches of several processes.

    Attributes:
        world_size: how many processes read.
        batch_size: what a batch takes of that order: its samples, or 1 where whole batches are dealt out; None where
            that is unknown.
        batches: of an epoch, on each process; None where that is unknown.
        common: whether all ranks share one order; else each reads its own, and nobody knows what the others have read.
    """

    world_size: int
    batch_size: int | None
    batches: int | None
    common: bool

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain types."""
        return asdict(self)

    def shares_order(self, other: Layout) -> bool:
        """Return whether a position in one is known to the sample in the other, whatever the batches."""
        return self.common and other.common and None not in (self.batch_size, other.batch_size)

    def deals_alike(self, other: Layout) -> bool:
        """Return whether the same samples meet in the same batches, under the same keys."""
        return (self.world_size, self.batch_size) == (other.world_size, other.batch_size)
