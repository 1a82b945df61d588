"""Samplers whose order is a function of seed and epoch, and that begin anywhere in it at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from itertools import chain, islice
from math import isqrt
from typing import Any, Final, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ....events.checks import check_whole_number, is_whole_number
from ....events.signatures import show_attributes
from ..draws.generators import digest


class SeekableSampler(Protocol):
    """What a sampler of one's own needs so that a run resumes inside an epoch without reading the data again.

    That is all: no base class, no state. The order must be a pure function of its arguments, for every epoch and as
    often as it is asked for; then it is the same after a resume, and with any number of workers. Example::

        class Backwards:
            def __init__(self, data):
                self.data = data

            def __len__(self):
                return len(self.data)

            def indices(self, seed, epoch, start):
                return iter(range(len(self) - 1 - start, -1, -1))

    An attribute `algorithm` (str) may name the way the order is made: a checkpoint with another name is not resumed
    inside an epoch as if nothing had changed. Without it, the name of the class is taken.
    """

    def __len__(self) -> int:
        """Return how many indices an epoch has."""
        ...

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return the indices of an epoch from a position on.

        Args:
            seed: the run's seed; one of the sampler's own may be used instead.
            epoch: counted from 0.
            start: how many indices to leave out, 0 to `len(self)`; this should take no time.
        """
        ...


def is_seekable(sampler: object) -> TypeGuard[SeekableSampler]:
    """Return whether a sampler keeps the protocol; torch's SubsetRandomSampler has `indices` too, but as a list."""
    return callable(getattr(sampler, "indices", None)) and hasattr(sampler, "__len__")


def algorithm_of(sampler: SeekableSampler) -> str:
    """Return the name of the way in which a sampler makes its order."""
    return str(getattr(sampler, "algorithm", type(sampler).__qualname__))


def seed_of(sampler: object) -> int | None:
    """Return the seed that a sampler has of its own, or the one that it goes by has; None where the run's counts."""
    while sampler is not None:
        seed = getattr(sampler, "seed", None)
        if isinstance(seed, int):
            return seed
        sampler = getattr(sampler, "sampler", None)
    return None


class _Seekable(Sampler[int], ABC):
    """A seekable sampler that can be given to a plain DataLoader too; then set the epoch with `set_epoch`."""

    seed: int | None = None
    epoch: int = 0
    __repr__ = show_attributes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]: ...

    def __iter__(self) -> Iterator[int]:
        return self.indices(self.seed or 0, self.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order a plain DataLoader reads next."""
        self.epoch = epoch


class SequentialSampler(_Seekable):
    """The samples in their own order.

    Args:
        data_or_size: the dataset, or how many samples there are.

    Raises:
        TypeError: there is no size.
        ValueError: there are no samples.
    """

    algorithm = "sequential"

    def __init__(self, data_or_size: Sized | int) -> None:
        self.size = _size_of(data_or_size)

    def __len__(self) -> int:
        return self.size

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return the indices from a position on."""
        return iter(range(_check_start(start, self), self.size))


class RandomSampler(_Seekable):
    """The samples in an order that is drawn again in every epoch.

    The order is a pure function of seed, epoch and the number of samples, on every machine. Beginning at position
    500 000 000 of 1 000 000 000 takes less than a millisecond and no memory to speak of.

    Args:
        data_or_size: the dataset, or how many samples there are.
        seed: instead of the run's seed.

    Raises:
        TypeError: there is no size, or the seed is not an integer.
        ValueError: there are no samples.
    """

    def __init__(self, data_or_size: Sized | int, *, seed: int | None = None) -> None:
        self.size = _size_of(data_or_size)
        self.seed = None if seed is None else check_whole_number("seed", seed)
        self.algorithm = algorithm(self.size)

    def __len__(self) -> int:
        return self.size

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return the indices of an epoch from a position on; a seed of the sampler's own goes before the given one."""
        own = seed if self.seed is None else self.seed
        return Permutation(self.size, own, epoch).iter_from(_check_start(start, self))


class DistributedSampler(_Seekable):
    """The share of one rank in another sampler's order: of W ranks, rank r reads the positions r, r + W, r + 2W, ...

    So where the global batch (batch size times ranks) is kept, each of its full batches holds the same samples for any
    number of ranks. Every rank reads equally many: the last round is filled up from the beginning of the order, or left
    out.

    Args:
        sampler: gives the global order; any sampler that keeps the protocol.
        rank: of this process, 0 to world_size - 1.
        world_size: how many ranks there are.
        drop_last: leave the last round out, where there are not enough samples for all ranks.

    Raises:
        TypeError: the sampler has no `indices(seed, epoch, start)` or no length, or a number is not an integer.
        ValueError: a number is out of range, or nothing is left of the samples.
    """

    def __init__(self, sampler: SeekableSampler, rank: int, world_size: int, *, drop_last: bool = False) -> None:
        if not is_seekable(sampler):
            raise TypeError(
                f"DistributedSampler needs a sampler with a length and indices(seed, epoch, start), got "
                f"{type(sampler).__name__}. Give heliograph.RandomSampler(dataset), say."
            )
        self.sampler = sampler
        self.rank, self.world_size = check_whole_number("rank", rank), check_whole_number("world_size", world_size)
        self.drop_last = drop_last
        self.algorithm = algorithm_of(sampler)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be 0 to world_size - 1, and world_size at least 1, got rank={rank}, "
                f"world_size={world_size}."
            )
        if not len(self):
            raise ValueError(
                f"DistributedSampler has no samples for a rank: {len(sampler)} for {world_size} ranks, "
                f"drop_last={drop_last}. Give more samples, fewer ranks or drop_last=False."
            )

    def __len__(self) -> int:
        size = len(self.sampler)
        return size // self.world_size if self.drop_last else -(-size // self.world_size)

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return this rank's indices of an epoch from one of its positions on."""
        return self._share(seed, epoch, _check_start(start, self) * self.world_size + self.rank)

    def _share(self, seed: int, epoch: int, position: int) -> Iterator[int]:
        size, end = len(self.sampler), len(self) * self.world_size
        while position < end:
            first = position % size  # beyond the size, the order begins again
            order = self.sampler.indices(seed, epoch, first)
            for number in islice(order, 0, min(size - first, end - position), self.world_size):
                yield number
                position += self.world_size


def _size_of(data_or_size: Any) -> int:
    size = len(data_or_size) if hasattr(data_or_size, "__len__") else data_or_size
    if not is_whole_number(size):
        raise TypeError(
            f"A sampler needs a dataset with a length or the number of samples (an integer), got "
            f"{data_or_size!r}. An iterable dataset has an order of its own: give it without a sampler."
        )
    if size < 1:
        raise ValueError(f"A sampler needs at least 1 sample, got {size}. Is the dataset empty?")
    return int(size)


def _check_start(start: int, sampler: Sized) -> int:
    if not 0 <= start <= len(sampler):
        raise ValueError(f"start must be 0 to {len(sampler)}, the length of the sampler, got {start}.")
    return start


Positions: TypeAlias = npt.NDArray[np.uint64]


_LARGEST_SHUFFLED: Final = 2**20


_ROUNDS: Final = 8


_BLOCK: Final = 8192


_HIGH: Final = np.uint64(32)


_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


_MIXER: Final = np.uint64(0xD6E8FEB86659FD93)


def algorithm(size: int) -> str:
    """Return the name of the algorithm that orders so many samples; another name means another order."""
    return "shuffle-1" if size <= _LARGEST_SHUFFLED else "feistel-1"


class Permutation:
    """An order of 0 to size - 1: a pure function of size and key, the same on every machine.

    Up to 2**20 numbers are shuffled, in 10 ms; more are computed from their positions, a block at a time.

    Args:
        size: how many numbers there are.
        key: integers of any size and sign.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._block = _shuffle(size, key) if size <= _LARGEST_SHUFFLED else _feistel(size, key)

    def iter_from(self, start: int) -> Iterator[int]:
        """Return the numbers from a position on, to the end."""
        blocks = (self._block(at, min(at + _BLOCK, self.size)).tolist() for at in range(start, self.size, _BLOCK))
        return chain.from_iterable(blocks)


def _shuffle(size: int, key: tuple[int, ...]) -> Callable[[int, int], npt.NDArray[np.integer]]:
    words = np.frombuffer(digest(*key, size=32, purpose=b"order"), "<u4")
    # The stream of RandomState is frozen for good, where torch.randperm promises nothing over releases.
    shuffler = np.random.RandomState(np.random.MT19937(0))  # a seed in its place would take a turn of the entropy
    shuffler.seed(words)
    order = shuffler.permutation(size)
    return lambda start, stop: order[start:stop]


def _feistel(size: int, key: tuple[int, ...]) -> Callable[[int, int], Positions]:
    """Return the numbers at a range of positions, by a Feistel network over pairs (left, right).

    A position is left * right_size + right. Each round adds to one half, modulo its size, a hash of the other, which
    could be undone: so pairs are permuted. They are a few more than the numbers: what falls outside goes round again.
    """
    left_size = isqrt(size - 1) + 1  # the square root, rounded up
    sizes = np.uint64(left_size), np.uint64(-(-size // left_size))
    keys = np.frombuffer(digest(*key, size=8 * _ROUNDS, purpose=b"order"), "<u8").astype(np.uint64)

    def permuted(positions: Positions) -> Positions:
        halves = [positions // sizes[1], positions % sizes[1]]
        for turn, round_key in enumerate(keys):
            side = turn % 2
            total = halves[side] + _hash(halves[1 - side], round_key, sizes[side])
            halves[side] = np.minimum(total, total - sizes[side])  # where it was smaller, it wrapped round to huge
        return halves[0] * sizes[1] + halves[1]

    def block(start: int, stop: int) -> Positions:
        numbers = permuted(np.arange(start, stop, dtype=np.uint64))
        while (outside := numbers >= size).any():
            numbers[outside] = permuted(numbers[outside])
        return numbers

    return block


def _hash(values: Positions, round_key: np.uint64, size: np.uint64) -> Positions:
    """Return a number below size for each value."""
    mixed = (values ^ round_key) * _MULTIPLIER
    mixed ^= mixed >> _HIGH
    mixed *= _MIXER
    return ((mixed >> _HIGH) * size) >> _HIGH  # of 32 bits, so that the product fits into 64
