"""The batches of an epoch, as far as every rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from ...data.last_batch import with_last
from ...data.order.sizes import SampleCounter
from ...data.training_data import TrainingData

UNEQUAL = "the ranks had unequally many batches: each epoch ended when the first of them had no more"


def read_together(
    batches: Iterator[Any],
    data: TrainingData,
    engine: Any,
    rest: int | None,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Return the batches as far as every rank has one; what a rank has beyond the shortest one's end is not read.

    Args:
        batches: this rank's.
        data: what they are read from; it learns how many samples all ranks have in hand.
        engine: connects the ranks.
        rest: how many batches are left, as the loader says; None where it does not.
        size_of: returns the samples in a batch.
        mark_last: called with whether the batch that is yielded next is the last, if a loader has no length or has
            reached it; None if no batch is to be read ahead.
    """
    data.together = None
    if rest is None and mark_last is not None:
        return _read_in_step(with_last(batches), data, engine, size_of, mark_last)
    if rest is None:
        return _read_in_step(((batch, False) for batch in batches), data, engine, size_of, None)
    if mark_last is not None and data.source is not None and data.source.as_it_is:  # it may have more than it says
        sure = ((batch, False) for batch in islice(batches, max(0, rest - 1)))
        return _read_in_step(chain(sure, with_last(batches)), data, engine, size_of, mark_last)
    left = islice(batches, max(0, rest))
    if data.source is not None and data.source.even and isinstance(size_of, SampleCounter):
        return left  # the ranks have equally many, and equally long ones; code of the user's may count otherwise
    return _read_in_step(((batch, False) for batch in left), data, engine, size_of, None)


def _read_in_step(
    batches: Iterator[tuple[Any, bool]],
    data: TrainingData,
    engine: Any,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Yield batches until a rank has none, or had its last; before each, add up how many samples they have."""
    while True:
        found = next(batches, None)
        batch, is_last = (None, True) if found is None else found
        own = None if found is None else int(size_of(batch)), is_last
        sizes, ends = zip(*engine.gather_objects(own), strict=True)
        if None in sizes:
            if not all(ends) and data.together is not None:  # some had batches until now
                data.note_once(UNEQUAL)
            return
        data.together = sum(sizes)
        if mark_last is not None:
            mark_last(any(ends))
        if any(ends) and not all(ends) and (data.source is None or data.source.length is None):
            data.note_once(UNEQUAL)
        yield batch
        if any(ends):
            return
