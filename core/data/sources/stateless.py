"""The base of most sources: they have no state, and are read again up to a position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..order.shares import ALONE, Layout, Share
from ..order.sizes import count_samples, length_of

if TYPE_CHECKING:
    from ....events import Position

Certainty = tuple["Position", tuple[str, ...]]
SEEKED: Certainty = ("seeked", ())


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of an epoch.

    Attributes:
        seed: of the order and of the draws.
        epoch: counted from 0.
        batch: the position to begin at, in consumed batches.
        apart: whether any code of the loader is kept away from the training's random stream.
        report: called with (done, all) while batches are read again to reach the position.
        is_over: whether another rank had no more there, so that this one's rest is not read either.
        check: called with the last of the batches that are read again.
        probes: whether the first batch that is read of a loader is loaded twice and compared.
        ahead: whether one item is read ahead.
        within: how many samples of the batch at the position are consumed; zero unless the source `cuts_batches`.
    """

    seed: int
    epoch: int
    batch: int
    apart: bool
    report: Callable[[int, int], None]
    is_over: bool = False
    check: Callable[[Any], None] | None = None
    probes: bool = False
    ahead: bool = False
    within: int = 0


class Stateless:
    """What most sources have in common: their position is the number of batches, and nothing needs closing."""

    even = False
    as_it_is = True
    common = False
    cuts_batches = False
    batch_size: int | None = None
    parts: Sequence[Any] = ()

    def __init__(self, loader: Any, kind: dict[str, Any], share: Share = ALONE) -> None:
        self.loader, self.kind, self.share = loader, kind, share
        self.length = length_of(loader)

    @property
    def layout(self) -> Layout:
        """How its epochs lie in the batches of all processes."""
        share = self.share
        return Layout(share.world_size, self.batch_size, self.length, self.common)

    def certainty(self) -> Certainty:
        """Return that a position is reached at once, and that nothing is untracked."""
        return SEEKED

    def hidden(self) -> tuple[float, list[str]]:
        """Return nothing: it is not looked for."""
        return 0.0, []

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing over."""

    def close(self) -> None:
        """Do nothing."""


class SequenceSource(Stateless):
    """A list or tuple of batches, dealt out in turn to the ranks.

    Args:
        loader: the batches.
        share: the part of this process.
        fills_up: whether all ranks read equally many, some of the first ones again; else each batch is read once.
    """

    as_it_is, common = False, True
    batch_size: int | None = 1

    def __init__(self, loader: Sequence[Any], share: Share = ALONE, *, fills_up: bool = True) -> None:
        super().__init__(loader, {"source": "sequence", "batches": len(loader)}, share)
        if share.world_size > 1:
            from ..order.dealt import full_batches

            rounds = full_batches(len(loader), share.world_size, drop_last=False)
            self._end = rounds * share.world_size if fills_up else len(loader)
            self.length = len(range(share.rank, self._end, share.world_size))
            self.even = self._end == len(loader) and len(set(map(count_samples, loader))) == 1

    def open(self, reading: Reading) -> Iterator[Any]:
        """Begin at the position."""
        if self.share.world_size == 1:
            return islice(self.loader, reading.batch, None) if reading.batch else iter(self.loader)
        first, apart_by = reading.batch * self.share.world_size + self.share.rank, self.share.world_size
        return (self.loader[number % len(self.loader)] for number in range(first, self._end, apart_by))
