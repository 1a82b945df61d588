"""Batches read one ahead, so that the last one is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield (batch, whether it is the last), reading one item ahead."""
    ahead = iter(batches)
    try:
        batch = next(ahead)
    except StopIteration:
        return
    for following in ahead:
        yield batch, False
        batch = following
    yield batch, True


def mark_last(batches: Iterable[T], mark: Callable[[bool], None]) -> Iterator[T]:
    """Yield batches, each after a call of `mark` with whether it is the last."""
    for batch, is_last in with_last(batches):
        mark(is_last)
        yield batch
