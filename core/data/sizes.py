"""Sizes: the samples of a batch, the batches of a loader, and the share of each process in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one process in a common order.

    Attributes:
        rank: of this process, from 0.
        world_size: the number of processes that read.
    """

    rank: int = 0
    world_size: int = 1


ALONE = Share()


@dataclass(frozen=True, slots=True)
class Layout:
    """How several processes batch an epoch.

    Attributes:
        world_size: the number of processes that read.
        batch_size: the indices of the order per batch: its samples, or 1 if complete batches are dealt; None if
            unknown.
        batches: of an epoch, per process; None if unknown.
        common: whether all ranks share one order; otherwise each reads its own, unknown to the others.
    """

    world_size: int
    batch_size: int | None
    batches: int | None
    common: bool

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def shares_order(self, other: Layout) -> bool:
        # Whether a position in one layout is known to the sample in the other.
        return self.common and other.common and None not in (self.batch_size, other.batch_size)

    def deals_alike(self, other: Layout) -> bool:
        # Whether batches have the same samples and keys.
        return (self.world_size, self.batch_size) == (other.world_size, other.batch_size)


class SampleCounter:
    """Count the samples of a batch: the common first dimension of its tensors.

    Args:
        warn: called once with a sentence, if the tensors disagree or there are none.
        streams: the names of the streams for each phase with streams; their samples are added up.
    """

    def __init__(self, warn: Callable[[str], None] | None = None, streams: Sequence[Collection[str]] = ()) -> None:
        self._warn, self._streams = warn, tuple(map(set, streams))

    def count(self, batch: Any) -> int:
        kind = batch.__class__
        if kind is not tuple and self._streams and isinstance(batch, Mapping) and batch.keys() in self._streams:
            return sum(self.count(part) for part in batch.values() if part is not None)
        try:
            if kind is tuple or kind is list:  # nearly always, mostly a pair: the general case takes 0.2 us longer
                if len(batch) == 2 and (size := batch[0].shape[0]) == batch[1].shape[0]:
                    return size  # type: ignore[no-any-return]  # a dimension
                parts = batch
            else:
                parts = batch.values() if kind is not Tensor and isinstance(batch, Mapping) else (batch,)
            sizes: set[int] = {part.shape[0] for part in parts}
            if len(sizes) == 1:
                return sizes.pop()
        except (AttributeError, IndexError, RuntimeError, TypeError):  # the batch has another structure
            pass
        from .first_dimensions import find_samples  # loaded for batches of another structure

        size, doubt = find_samples(batch)
        if doubt and self._warn is not None:
            self._warn(doubt)
            self._warn = None
        return size


count_samples = SampleCounter().count


def size_counter(task: Any, count: Callable[[Any], int]) -> Callable[[Any], int]:
    # `task.batch_size(batch)` takes precedence.
    batch_size = getattr(task, "batch_size", None)
    if not callable(batch_size):
        return count

    def checked(batch: Any) -> int:
        if not isinstance(size := batch_size(batch), Integral) or size < 0:
            raise TypeError(
                f"{type(task).__name__}.batch_size(batch) returned {size!r:.100}: return an int, at least 0."
            )
        return int(size)

    return checked


def length_of(loader: Iterable[Any] | None) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]  # it may have no length
    except TypeError:
        return None
