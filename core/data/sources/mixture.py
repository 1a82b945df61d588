"""How several streams make one: which of them each batch is of, and how far each has been read by then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..draws.generators import digest

Mode = Literal["cycle", "min", "max", "weighted"]
MODES: tuple[Mode, ...] = get_args(Mode)
Lengths = Mapping[str, int | None]


class Mixture:
    """Which streams the batches of an epoch are of; the base: one batch of each in every batch, as `min` and `max`.

    Args:
        mode: its name.
        batches: of an epoch, where they are given.

    Attributes:
        wraps: whether a stream that has ended begins again.
    """

    def __init__(self, mode: Mode, batches: int | None = None) -> None:
        self.mode, self._batches = mode, batches
        self.wraps = mode in ("cycle", "weighted")

    def length(self, lengths: Lengths) -> int | None:
        """Return the batches of an epoch, given those of each stream; None where that is unknown.

        Raises:
            ValueError: it has to be known.
        """
        if self._batches is not None:
            return self._batches
        unknown = [name for name, length in lengths.items() if length is None]
        if unknown and self.wraps:
            raise ValueError(
                f"mode={self.mode!r} needs the length of an epoch, and the stream {unknown[0]!r} has none: say how "
                f"many batches an epoch has, Streams(..., length=1000), or give mode='min' or 'max'."
            )
        known = [length or 0 for length in lengths.values()]
        return None if unknown else self._of_all(known)

    def passes(self, length: int | None, of_stream: int | None) -> int:
        """Return how many passes over a stream an epoch has at most: as many of its own epochs it takes up."""
        return 1 if not self.wraps or length is None else ceil(length / (of_stream or 1))

    def begin(self, seed: int, epoch: int, length: int | None) -> None:
        """Decide what the batches of an epoch are of."""

    def chosen(self, batch: int) -> str | None:
        """Return the one stream that a batch is of; None where it is of all of them."""
        return None

    def taken(self, stream: str, batch: int) -> int:
        """Return how many batches of a stream are in the first so many ones of the epoch."""
        return batch

    def _of_all(self, lengths: Sequence[int]) -> int:
        return min(lengths) if self.mode == "min" else max(lengths)


class Weighted(Mixture):
    """Each batch is of one stream, drawn independently of the others.

    The draws are a function of seed, epoch and position, all of an epoch at once: to find how far each stream has been
    read takes no data, and about 0.1 s for a million batches.

    Args:
        weights: of each stream; in proportion to the batches of each where there are none.
        batches: of an epoch; those of all streams together where that is None.
    """

    def __init__(self, weights: Mapping[str, float] | None, batches: int | None) -> None:
        super().__init__("weighted", batches)
        self._weights = weights
        self._names: list[str] = []
        self._ends: npt.NDArray[np.float64] = np.zeros(0)
        self._chosen: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def length(self, lengths: Lengths) -> int | None:
        """Return the given number of batches, or the sum."""
        length = super().length(lengths)
        self._names = sorted(lengths)  # so that the draws do not depend on the order in which they are given
        shares: Lengths | Mapping[str, float] = lengths if self._weights is None else self._weights
        self._ends = np.cumsum([float(shares[name] or 0) for name in self._names])
        return length

    def begin(self, seed: int, epoch: int, length: int | None) -> None:
        """Draw the stream of each batch."""
        key = int.from_bytes(digest(seed, epoch, size=16, purpose=b"choice"), "little")
        drawn = np.random.Generator(np.random.PCG64(key)).random(length or 0)
        chosen = np.searchsorted(self._ends[:-1], drawn * self._ends[-1], side="right")
        self._chosen = chosen.astype(np.int32)

    def chosen(self, batch: int) -> str | None:
        """Return what was drawn."""
        return self._names[int(self._chosen[batch])]

    def taken(self, stream: str, batch: int) -> int:
        """Count what was drawn."""
        return int(np.count_nonzero(self._chosen[:batch] == self._names.index(stream)))

    def _of_all(self, lengths: Sequence[int]) -> int:
        return sum(lengths)
