"""The batches of an epoch, up to the end of the shortest rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from ...data.last_batch import with_last
from ...data.order.sizes import SampleCounter
from ...data.training_data import TrainingData

UNEQUAL = "the ranks had different numbers of batches: each epoch ended with the shortest rank"


def read_together(
    batches: Iterator[Any],
    data: TrainingData,
    engine: Any,
    remaining: int | None,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    """Return the batches that every rank has; batches after the end of the shortest rank are not read.

    Args:
        batches: this rank's.
        data: their source; its `together` becomes the number of samples of all ranks.
        engine: connects the ranks.
        remaining: the number of remaining batches by the loader's length; None if it has none.
        size_of: returns the samples in a batch.
        mark_last: called with whether the next batch is the last, if a loader has no length or has reached it; None to
            disable reading ahead.
    """
    data.together = None
    if remaining is None and mark_last is not None:
        return _read_in_step(with_last(batches), data, engine, size_of, mark_last)
    if remaining is None:
        return _read_in_step(((batch, False) for batch in batches), data, engine, size_of, None)
    if (
        mark_last is not None and data.source is not None and data.source.as_it_is
    ):  # it may have more batches than its length
        sure = ((batch, False) for batch in islice(batches, max(0, remaining - 1)))
        return _read_in_step(chain(sure, with_last(batches)), data, engine, size_of, mark_last)
    batches = islice(batches, max(0, remaining))
    if data.source is not None and data.source.even and isinstance(size_of, SampleCounter):
        return batches  # the ranks have equally many batches of equal sizes, unless user code counts samples
    return _read_in_step(((batch, False) for batch in batches), data, engine, size_of, None)


def _read_in_step(
    batches: Iterator[tuple[Any, bool]],
    data: TrainingData,
    engine: Any,
    size_of: Callable[[Any], int],
    mark_last: Callable[[bool], None] | None,
) -> Iterator[Any]:
    # Ends when a rank has no batch, or had its last one. Before each batch, the samples of all ranks are summed.
    while True:
        item = next(batches, None)
        batch, is_last = (None, True) if item is None else item
        size = None if item is None else int(size_of(batch))
        sizes, ends = zip(*engine.gather_objects((size, is_last)), strict=True)
        if None in sizes:
            if not all(ends) and data.together is not None:  # some ranks had more
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
