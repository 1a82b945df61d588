"""Limits: the first batches of an epoch, for `limit_train` and the limits of evaluation sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...events import Engine
from ...events.checks import is_whole_number
from ..system.extras import kind_of
from .sizes import Share
from .source import SEEKED, Certainty, Reading, Source, Sourced, nested
from .source_choice import source_of

Limit = int | float


def check_limit(name: str, limit: Any) -> Limit:
    if (is_whole_number(limit) and limit >= 1) or (isinstance(limit, float) and 0 < limit <= 1):
        return limit if isinstance(limit, float) else int(limit)
    raise ValueError(
        f"{name} is a number of batches such as 100, at least 1, or a fraction such as 0.1, where 1.0 is all; "
        f"got {limit!r}."
    )


def limited_length(limit: Limit, length: int | None, role: str) -> int:
    """Return the maximal number of batches within a limit.

    A fraction is rounded down to at least one batch.

    Raises:
        ValueError: it is a fraction of an unknown length.
    """
    if isinstance(limit, int):
        return limit
    if length is None:
        raise ValueError(
            f"The limit {limit} is a fraction of the {role}, which has no length: give a number of batches."
        )
    return max(1, int(round(length * limit, 6)))


class Limited(Sourced):
    """A loader with a limit on the batches of an epoch.

    Args:
        loader: the user's.
        limit: the number or fraction of its batches that each process reads.
        role: of the loader, for errors.
        per_sample: whether draws are keyed by sample.
    """

    def __init__(self, loader: Any, limit: Limit, role: str, *, per_sample: bool = False) -> None:
        self.loader, self.limit, self.role, self.per_sample = loader, limit, role, per_sample

    def source(self, share: Share, engine: Engine | None, *, fills_up: bool) -> Source:
        inner = source_of(self.loader, share, per_sample=self.per_sample, engine=engine)
        return LimitedSource(inner, self)


class LimitedSource(Source):
    """Reads another source up to a limit, without an effect on the order of the next epoch.

    Args:
        inner: the other source.
        limited: the loader with the limit.
    """

    def __init__(self, inner: Source, limited: Limited) -> None:
        self._inner, self._limited = inner, limited
        self.loader, self.share = inner.loader, inner.share
        self.parts = (inner,)
        self.facts = {"limit": limited.limit}
        self.combine()

    def combine(self) -> None:
        inner = self._inner
        self.even, self.as_it_is, self.common = inner.even, inner.as_it_is, inner.common
        self.batch_size, self.kind = inner.batch_size, {**inner.kind, **self.facts}
        self._most = limited_length(self._limited.limit, inner.length, self._limited.role)
        self.length = None if inner.length is None else min(inner.length, self._most)

    def open(self, reading: Reading) -> Iterator[Any]:
        if reading.batch >= self._most and not reading.is_over:
            return iter(())
        return islice(self._inner.open(reading), self._most - reading.batch)

    def compared(self, batch: Any, number: int) -> Any:
        return self._inner.compared(batch, number)

    def certainty(self) -> Certainty:
        return self._inner.certainty() if self.length == self._inner.length is not None else left_early(self._inner)

    def state_dict(self, batch: int) -> dict[str, Any]:
        return self._inner.state_dict(batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)


def left_early(source: Source) -> Certainty:
    """Return the certainty of a source whose epochs end early.

    A loader with its own position may continue there in the next epoch, or start over: this is unknown.
    """
    position, untracked = source.certainty()
    for part in nested(source):
        if not part.parts and part.kind["source"] == "stateful" and part.certainty() != SEEKED:
            text = (
                f"an epoch ends before {kind_of(part.loader)} does, and the next epoch may continue at another position"
            )
            position, untracked = "unknown", (*untracked, text)
    return position, untracked
