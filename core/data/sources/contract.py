"""What the loop asks of a loader, whatever its kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset

from ....events import Engine
from ..order.shares import Layout, Share
from .stateless import Certainty, Reading


class Source(Protocol):
    """A loader, as the loop reads it.

    Attributes:
        loader: what the user gave.
        length: its batches, None where that is unknown. On several ranks the smallest, once they have agreed.
        kind: plain facts that must be the same for a position within an epoch to mean the same, on every rank.
        even: whether the batches of all ranks are as large as this one's.
        as_it_is: whether every rank reads all of it, whatever the others read.
        batch_size: what a batch takes of the order; see `Layout`. None: unknown, or not the same on all ranks.
        cuts_batches: whether it can begin within a batch, where it reads for one rank.
        parts: the sources that it reads, where it is made of others.
    """

    loader: Any
    length: int | None
    kind: dict[str, Any]
    even: bool
    as_it_is: bool
    batch_size: int | None
    cuts_batches: bool
    parts: Sequence[Source]

    @property
    def layout(self) -> Layout:
        """How its epochs lie in the batches of all processes."""

    def open(self, reading: Reading) -> Iterator[Any]:
        """Return the batches from a position on."""

    def certainty(self) -> Certainty:
        """Return how a position is reached, and in sentences what no checkpoint holds of the order and the draws."""

    def hidden(self) -> tuple[float, list[str]]:
        """Return the seconds that the first batch took to be compared, and a sentence for each hidden state so far."""

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return what the position needs besides the number of consumed batches of the epoch, which is given."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; the next `open` continues from it."""

    def close(self) -> None:
        """Let worker processes go."""


class Compound(ABC):
    """A source that is made of others.

    Attributes:
        own: what of `kind` is not that of its parts.
    """

    own: dict[str, Any]

    @abstractmethod
    def combine(self) -> None:
        """Take over what the ranks have agreed on for its parts."""

    @abstractmethod
    def compared(self, batch: Any, number: int) -> Any:
        """Return what of a batch is read again where a run resumes after it.

        Args:
            batch: as it was read.
            number: which of the epoch, from 1.
        """


def nested(source: Source) -> Iterator[Source]:
    """Yield a source, then those that it is made of."""
    yield source
    for part in source.parts:
        yield from nested(part)


class Sourced(ABC):
    """A loader of ours that knows what reads it."""

    @abstractmethod
    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return what reads the share of a process.

        Args:
            share: the part of this process.
            engine: connects several processes.
            fills_up: whether all ranks read equally much, as in a training; else each sample is read once.
        """


class Known(Dataset[Any]):
    """A map-style dataset of which more is known than its length.

    Attributes:
        facts: with others, its samples are others: a checkpoint keeps them, and ranks compare them.
    """

    facts: dict[str, Any]
