"""Batches and loaders of any kind: how many samples, how many batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor


class SampleCounter:
    """Count the samples of a batch: the first dimension that its tensors have in common.

    Args:
        warn: called once, with a sentence, if the tensors disagree or there are none.
        streams: the names of the streams, for each phase that has some; their samples are added up.
    """

    def __init__(self, warn: Callable[[str], None] | None = None, streams: Sequence[Collection[str]] = ()) -> None:
        self._warn, self._streams = warn, tuple(map(set, streams))
        self._tensors: dict[type, list[Callable[[Any], Any]]] = {}  # where they were in the last batch of a type

    def __call__(self, batch: Any) -> int:
        """Return the number of samples; a stream that is over has none."""
        kind = batch.__class__
        if self._streams and isinstance(batch, Mapping) and batch.keys() in self._streams:
            return sum(self(part) for part in batch.values() if part is not None)
        try:
            if (kind is tuple or kind is list) and len(batch) == 2:
                first, second = batch  # tensors, nearly always
                if first.__class__ is second.__class__ is Tensor and (size := first.shape[0]) == second.shape[0]:
                    return size
            sizes: set[int] = {get(batch).shape[0] for get in self._tensors.get(kind, ())}
            if len(sizes) == 1:
                return sizes.pop()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):  # it is another kind of batch
            pass
        from .first_dimensions import find_samples  # loaded for batches of another form

        size, self._tensors[kind], doubt = find_samples(batch)
        if doubt and self._warn is not None:
            self._warn(doubt)
            self._warn = None
        return size


count_samples = SampleCounter()


def size_counter(task: Any, counter: SampleCounter) -> Callable[[Any], int]:
    """Return what counts the samples of a batch: `task.batch_size(batch)` if the task has it, else `counter`."""
    own = getattr(task, "batch_size", None)
    if not callable(own):
        return counter

    def checked(batch: Any) -> int:
        if not isinstance(size := own(batch), Integral) or size < 0:
            raise TypeError(
                f"{type(task).__name__}.batch_size(batch) returned {size!r:.100}: return an int, at least 0."
            )
        return int(size)

    return checked


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches of a loader, None where it does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:
        return None
