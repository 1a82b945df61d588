"""The base class of sources, which read a loader for the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from .sizes import ALONE, Layout, Share, count_samples, length_of

if TYPE_CHECKING:
    from ...events import Engine, Position


Certainty = tuple["Position", tuple[str, ...]]
SEEKED: Certainty = ("seeked", ())


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of an epoch.

    Attributes:
        seed: of the order and of the draws.
        epoch: counted from 0.
        batch: the start position, in consumed batches.
        isolated: whether all code of the loader is isolated from the training's random stream.
        report: called with (done, all) while batches are read again to reach the position.
        is_over: whether another rank had no more batches there, so that the rest is not read.
        check: called with the last of the batches that are read again.
        probes: whether the first batch of a loader is loaded twice and compared.
        ahead: whether one item is read ahead.
    """

    seed: int
    epoch: int
    batch: int
    isolated: bool
    report: Callable[[int, int], None]
    is_over: bool = False
    check: Callable[[Any], None] | None = None
    probes: bool = False
    ahead: bool = False


class Source:
    """A loader as the loop reads it.

    The base class of all sources. By default their position is the number of batches, and nothing needs closing.

    Args:
        loader: the user's loader.
        kind: plain facts that must be equal on all ranks and at a resume for a position to mean the same.
        share: the part of this process.

    Attributes:
        length: its batches, None if unknown. With several ranks, the smallest, after they have agreed.
        even: whether the batches of all ranks have the same sizes.
        as_it_is: whether every rank reads all of it.
        common: whether all ranks share one order.
        batch_size: the indices of the order per batch; see `Layout`. None if unknown or different between ranks.
        parts: the sources that a compound source reads.
        facts: the part of `kind` that the parts of a compound source do not have.
    """

    even = False
    as_it_is = True
    common = False
    batch_size: int | None = None
    parts: Sequence[Source] = ()
    facts: Mapping[str, Any] = {}

    def __init__(self, loader: Any, kind: dict[str, Any], share: Share = ALONE) -> None:
        self.loader, self.kind, self.share = loader, kind, share
        self.length = length_of(loader)

    @property
    def layout(self) -> Layout:
        """How all processes batch its epochs."""
        return Layout(self.share.world_size, self.batch_size, self.length, self.common)

    def open(self, reading: Reading) -> Iterator[Any]:
        """Return the batches from a position on."""
        raise NotImplementedError

    def combine(self) -> None:
        """Update a compound source from its parts, after the ranks have agreed on those."""

    def compared(self, batch: Any, number: int) -> Any:
        """Return the part of a batch that a resume compares; batches count from 1."""
        return batch

    def certainty(self) -> Certainty:
        """Return how a position is reached, and sentences about untracked state of order and draws."""
        return SEEKED

    def hidden(self) -> list[str]:
        """Return a sentence for each hidden state that was found so far."""
        return [text for part in self.parts for text in part.hidden()]

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return the state beyond the number of consumed batches, which is given."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; the next `open` continues from it."""

    def close(self) -> None:
        """Stop worker processes."""
        for part in self.parts:
            part.close()


class SequenceSource(Source):
    """A list or tuple of batches, dealt to the ranks in turn.

    Args:
        loader: the batches.
        share: the part of this process.
        fills_up: whether all ranks read the same number, some of the first ones again; otherwise each batch once.
    """

    as_it_is, common = False, True
    batch_size: int | None = 1

    def __init__(self, loader: Sequence[Any], share: Share = ALONE, *, fills_up: bool = True) -> None:
        super().__init__(loader, {"source": "sequence", "batches": len(loader)}, share)
        if share.world_size > 1:
            from .dealt import full_batches

            rounds = full_batches(len(loader), share.world_size, drop_last=False)
            self._end = rounds * share.world_size if fills_up else len(loader)
            self.length = len(range(share.rank, self._end, share.world_size))
            self.even = self._end == len(loader) and len(set(map(count_samples, loader))) == 1

    def open(self, reading: Reading) -> Iterator[Any]:
        if self.share.world_size == 1:
            return islice(self.loader, reading.batch, None) if reading.batch else iter(self.loader)
        ranks = self.share.world_size
        first = reading.batch * ranks + self.share.rank
        return (self.loader[number % len(self.loader)] for number in range(first, self._end, ranks))


def nested(source: Source) -> Iterator[Source]:
    # The source itself, then all its parts.
    yield source
    for part in source.parts:
        yield from nested(part)


class Sourced(ABC):
    """A loader of this package that makes its own source.

    Attributes:
        loaders: the loaders of its streams, by name; empty for a single stream.
    """

    loaders: Mapping[str, Any] = {}

    def describe(self) -> str:
        """Return the names and lengths of its streams, as text."""
        return ""

    @abstractmethod
    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return the source that reads the share of a process.

        Args:
            share: the part of this process.
            engine: connects several processes.
            fills_up: whether all ranks read the same number of batches, as in a training; otherwise each sample once.
        """


def loaders_of(loader: Any) -> Mapping[str, Any]:
    # The loaders of several streams by name; a single loader has the name "".
    return (loader.loaders if isinstance(loader, Sourced) else {}) or {"": loader}


class FactsDataset(Dataset[Any]):
    """A map-style dataset with facts for the checkpoint.

    Attributes:
        facts: identify its samples: a checkpoint saves them, and ranks compare them.
    """

    facts: dict[str, Any]
