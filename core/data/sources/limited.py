"""The first batches of an epoch: what `limit_train` and the limits of validation sets leave of a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ....events import Engine
from ....events.checks import is_whole_number
from ...system.extras import kind_of
from ..order.shares import Layout, Share
from .choice import source_of
from .contract import Compound, Source, Sourced, nested
from .stateless import SEEKED, Certainty, Reading

Limit = int | float


def check_limit(name: str, limit: Any) -> Limit:
    """Return a limit: a whole number of batches, or a fraction of them; ValueError where it is neither."""
    if (is_whole_number(limit) and limit >= 1) or (isinstance(limit, float) and 0 < limit <= 1):
        return limit if isinstance(limit, float) else int(limit)
    raise ValueError(
        f"{name} is a number of batches such as 100, at least 1, or a fraction such as 0.1, where 1.0 is all; "
        f"got {limit!r}."
    )


def limited_length(limit: Limit, length: int | None, what: str) -> int:
    """Return how many batches a limit leaves at most.

    A fraction is rounded down, but leaves at least one batch.

    Raises:
        ValueError: it is a fraction of an unknown length.
    """
    if isinstance(limit, int):
        return limit
    if length is None:
        raise ValueError(
            f"{limit} of the {what} is asked for, and it has no length: give the limit as a number of batches."
        )
    return max(1, int(round(length * limit, 6)))


class Limited(Sourced):
    """A loader of which an epoch reads the first batches only.

    Args:
        loader: the user's.
        limit: how many batches, or which fraction of them, each process reads.
        what: it is, for errors.
        per_sample: whether draws are keyed by sample.
    """

    def __init__(self, loader: Any, limit: Limit, what: str, *, per_sample: bool = False) -> None:
        self.loader, self.limit, self.what, self.per_sample = loader, limit, what, per_sample

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        """Return what reads the share of a process."""
        inner = source_of(self.loader, share, per_sample=self.per_sample, engine=engine)
        return LimitedSource(inner, self)


class LimitedSource(Compound):
    """Reads another source up to a limit; the order of the next epoch is what it would be without.

    Args:
        inner: the other source.
        limited: how much of it is read.
    """

    def __init__(self, inner: Source, limited: Limited) -> None:
        self._inner, self._limited = inner, limited
        self.loader = inner.loader
        self.parts: Sequence[Source] = (inner,)
        self.own = {"limit": limited.limit}
        self.combine()

    def combine(self) -> None:
        """Take over what the ranks have agreed on."""
        inner = self._inner
        self.even, self.as_it_is = inner.even, inner.as_it_is
        self.batch_size, self.cuts_batches = inner.batch_size, inner.cuts_batches
        self.kind = {**inner.kind, **self.own}
        self._most = limited_length(self._limited.limit, inner.length, self._limited.what)
        self.length = None if inner.length is None else min(inner.length, self._most)

    @property
    def layout(self) -> Layout:
        """How its epochs lie in the batches of all processes."""
        whole = self._inner.layout
        return Layout(whole.world_size, whole.batch_size, self.length, whole.common)

    def open(self, reading: Reading) -> Iterator[Any]:
        """Read from a position on, as far as the limit."""
        if reading.batch >= self._most and not reading.is_over:
            return iter(())
        return islice(self._inner.open(reading), self._most - reading.batch)

    def compared(self, batch: Any, number: int) -> Any:
        """Return what of a batch is read again where a run resumes after it."""
        return self._inner.compared(batch, number) if isinstance(self._inner, Compound) else batch

    def certainty(self) -> Certainty:
        """Return how a position is reached, and what is untracked."""
        return self._inner.certainty() if self.length == self._inner.length is not None else left_early(self._inner)

    def hidden(self) -> tuple[float, list[str]]:
        """Return what was found when the first batch was loaded."""
        return self._inner.hidden()

    def state_dict(self, batch: int) -> dict[str, Any]:
        """Return the state of what is read."""
        return self._inner.state_dict(batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of what is read."""
        self._inner.load_state_dict(state)

    def close(self) -> None:
        """Let worker processes go."""
        self._inner.close()


def left_early(source: Source) -> Certainty:
    """Return the certainty of a source of which epochs end before it does.

    A loader that keeps its own position may continue there in the next epoch; which of the two it does, nobody knows.
    """
    position, untracked = source.certainty()
    for part in nested(source):
        if not part.parts and part.kind["source"] == "stateful" and part.certainty() != SEEKED:
            text = f"an epoch ends before {kind_of(part.loader)} does, and may not begin again there"
            position, untracked = "unknown", (*untracked, text)
    return position, untracked
