"""Batches as far as every rank has one: ranks whose loaders end at different places end their epochs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ...data.batch import batch_size
from ...data.last_batch import with_last
from ...data.training_data import TrainingData


def read_together(
    batches: Iterator[Any],
    data: TrainingData,
    engine: Any,
    rest: int | None,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None],
) -> Iterator[Any]:
    """Return the batches as far as every rank has one; what a rank has beyond the shortest one's end is not read.

    Args:
        batches: this rank's.
        data: what they are read from; it learns how many samples all ranks have in hand.
        engine: connects the ranks.
        rest: how many batches are left, as the loader says; None where it does not.
        size_of: returns the samples in a batch.
        mark_last: called where a loader has no length, with whether the batch that is yielded next is the last.
    """
    data.together = None
    if rest is None:
        return _voted(with_last(batches), data, engine, size_of, mark_last)
    left = islice(batches, max(0, rest))
    if data.source is not None and data.source.even and size_of is batch_size:
        return left  # the ranks have equally many, and equally long ones
    return _voted(((batch, False) for batch in left), data, engine, size_of, None)


def _voted(
    batches: Iterator[tuple[Any, bool]],
    data: TrainingData,
    engine: Any,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Yield batches until a rank has none, or had its last; each vote adds up how many samples they have."""
    while True:
        found = next(batches, None)
        batch, is_last = (None, True) if found is None else found
        sizes = [0.0] * engine.world_size
        sizes[engine.rank] = 0.0 if found is None else float(size_of(batch))
        misses, ends, continues, *sizes = engine.vote([found is None, is_last, not is_last, *sizes])
        if misses:
            return
        data.together = int(sum(sizes))
        if mark_last is not None:
            mark_last(bool(ends))
        if ends and continues:
            data.note_once("the ranks had unequally many batches: each epoch ended when the first of them had no more")
        yield batch
        if ends:
            return
