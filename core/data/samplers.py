"""Samplers whose order is a function of seed and epoch, with a start at any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from hashlib import blake2b
from itertools import chain, islice
from math import isqrt
from typing import Any, Final, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ...events.checks import check_flag, check_whole_number, is_whole_number
from ...events.signatures import show_attributes
from .rng import digest


class SeekableSampler(Protocol):
    """Protocol of samplers that resume within an epoch without reading data again.

    There is no base class and no state. The order must be a pure function of the arguments of `indices`; then it is the
    same after a resume, and with any number of workers. Example::

        class Backwards:
            def __init__(self, data):
                self.data = data

            def __len__(self):
                return len(self.data)

            def indices(self, seed, epoch, start):
                return iter(range(len(self) - 1 - start, -1, -1))

    An attribute `algorithm` (str) may identify how the order is computed: if it differs from the checkpoint, a resume
    within an epoch is refused or reported. The default is the name of the class.
    """

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        ...

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return the indices of an epoch from a position on.

        Args:
            seed: the run's seed; a sampler may use its own instead.
            epoch: counted from 0.
            start: the number of indices to skip, 0 to `len(self)`; skipping should take no time.
        """
        ...


def is_seekable(sampler: object) -> TypeGuard[SeekableSampler]:
    # torch's SubsetRandomSampler has `indices` too, but as a list.
    return callable(getattr(sampler, "indices", None)) and hasattr(sampler, "__len__")


def algorithm_of(sampler: SeekableSampler) -> str:
    return str(getattr(sampler, "algorithm", type(sampler).__qualname__))


def seed_of(sampler: object) -> int | None:
    # The seed of the sampler or of a wrapped one; None if the run's seed applies.
    while sampler is not None:
        seed = getattr(sampler, "seed", None)
        if isinstance(seed, int):
            return seed
        sampler = getattr(sampler, "sampler", None)
    return None


class _Seekable(Sampler[int], ABC):
    """A seekable sampler that also works in a plain DataLoader, with `set_epoch`."""

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
        """Set the epoch for a plain DataLoader."""
        self.epoch = epoch


class SequentialSampler(_Seekable):
    """The samples in their original order.

    Args:
        data_or_size: the dataset, or the number of samples.

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
    """The samples in a new random order in every epoch.

    The order is a pure function of seed, epoch and the number of samples, on every machine. Starting at position
    500 000 000 of 1 000 000 000 takes less than a millisecond and almost no memory.

    Args:
        data_or_size: the dataset, or the number of samples.
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
        """Return the indices of an epoch from a position on.

        The sampler's own seed takes precedence.
        """
        return Permutation(self.size, seed if self.seed is None else self.seed, epoch).iter_from(
            _check_start(start, self)
        )


class DistributedSampler(_Seekable):
    """The share of one rank in another sampler's order.

    Rank r of W reads the positions r, r + W, r + 2W, ... If the global batch (batch size times ranks) stays the same,
    each full global batch has the same samples for any number of ranks. Every rank reads the same number: the last
    round is filled up from the start of the order, or dropped.

    Args:
        sampler: defines the global order; any seekable sampler.
        rank: of this process, 0 to world_size - 1.
        world_size: the number of ranks.
        drop_last: drop an incomplete last round.

    Raises:
        TypeError: the sampler has no `indices(seed, epoch, start)` or no length, or a number is not an integer.
        ValueError: a number is out of range, or a rank has no samples.
    """

    def __init__(self, sampler: SeekableSampler, rank: int, world_size: int, *, drop_last: bool = False) -> None:
        if not is_seekable(sampler):
            raise TypeError(
                f"DistributedSampler needs a sampler with a length and indices(seed, epoch, start), got "
                f"{type(sampler).__name__}. Use, for example, heliograph.RandomSampler(dataset)."
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
                f"DistributedSampler has too few samples: {len(sampler)} for {world_size} ranks, "
                f"drop_last={drop_last}. Use more samples, fewer ranks or drop_last=False."
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
            first = position % size  # beyond the size, the order starts over
            order = self.sampler.indices(seed, epoch, first)
            for number in islice(order, 0, min(size - first, end - position), self.world_size):
                yield number
                position += self.world_size


def _size_of(data_or_size: Any) -> int:
    size = len(data_or_size) if hasattr(data_or_size, "__len__") else data_or_size
    if not is_whole_number(size) or size < 1:
        raise ValueError(
            f"A sampler needs a dataset with at least 1 sample, or their number, got {data_or_size!r:.100}. An "
            f"iterable dataset defines its own order: pass it without a sampler."
        )
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
    # A different name means a different order.
    return "shuffle-1" if size <= _LARGEST_SHUFFLED else "feistel-1"


class Permutation:
    """A permutation of 0 to size - 1: a pure function of size and key, the same on every machine.

    Up to 2**20 numbers are shuffled, in 10 ms; larger permutations are computed from the positions, block by block.

    Args:
        size: how many numbers there are.
        key: integers of any size and sign.
    """

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._block = _shuffle(size, key) if size <= _LARGEST_SHUFFLED else _feistel(size, key)

    def iter_from(self, start: int) -> Iterator[int]:
        blocks = (self._block(at, min(at + _BLOCK, self.size)).tolist() for at in range(start, self.size, _BLOCK))
        return chain.from_iterable(blocks)


def _shuffle(size: int, key: tuple[int, ...]) -> Callable[[int, int], npt.NDArray[np.integer]]:
    words = np.frombuffer(digest(*key, size=32, purpose=b"order"), "<u4")
    # The stream of RandomState is frozen; torch.randperm may change between releases.
    shuffler = np.random.RandomState(np.random.MT19937(0))  # without a seed it would consume keyed entropy
    shuffler.seed(words)
    order = shuffler.permutation(size)
    return lambda start, stop: order[start:stop]


def _feistel(size: int, key: tuple[int, ...]) -> Callable[[int, int], Positions]:
    """Return the numbers at a range of positions, by a Feistel network over pairs (left, right).

    A position is left * right_size + right. Each round adds to one half, modulo its size, a hash of the other half,
    which is invertible, so pairs are permuted. There are slightly more pairs than numbers: a result outside is permuted
    again.
    """
    left_size = isqrt(size - 1) + 1  # the square root, rounded up
    sizes = np.uint64(left_size), np.uint64(-(-size // left_size))
    keys = np.frombuffer(digest(*key, size=8 * _ROUNDS, purpose=b"order"), "<u8").astype(np.uint64)

    def permuted(positions: Positions) -> Positions:
        halves = [positions // sizes[1], positions % sizes[1]]
        for turn, round_key in enumerate(keys):
            side = turn % 2
            total = halves[side] + _hash(halves[1 - side], round_key, sizes[side])
            halves[side] = np.minimum(total, total - sizes[side])  # an underflow wraps to a huge number
        return halves[0] * sizes[1] + halves[1]

    def block(start: int, stop: int) -> Positions:
        numbers = permuted(np.arange(start, stop, dtype=np.uint64))
        while (outside := numbers >= size).any():
            numbers[outside] = permuted(numbers[outside])
        return numbers

    return block


def _hash(values: Positions, round_key: np.uint64, size: np.uint64) -> Positions:
    mixed = (values ^ round_key) * _MULTIPLIER
    mixed ^= mixed >> _HIGH
    mixed *= _MIXER
    return ((mixed >> _HIGH) * size) >> _HIGH  # 32 bits, so that the product fits into 64


Lengths = npt.NDArray[np.int64]


class LengthGroupedSampler(_Seekable):
    """A random order with samples of similar length in a batch, to reduce padding.

    The order of each epoch is cut into groups of `batches` times `batch_size` samples, and each group is sorted, the
    longest first, like `group_by_length` of the HF Trainer. It is a pure function of seed and epoch; starting at any
    position sorts one group. Use it as `loader_params={"batch_size": ..., "sampler": ...}`.

    Args:
        lengths: the length of each sample: integers, [samples].
        batch_size: samples per batch; with several ranks, of the batches of all ranks together.
        batches: per group.
        seed: instead of the run's seed.

    Raises:
        TypeError: a length is not an integer.
        ValueError: there are no samples, a length is negative, or a number is not positive.
    """

    def __init__(self, lengths: Any, batch_size: int, *, batches: int = 50, seed: int | None = None) -> None:
        self._lengths = _checked(lengths, at_least=0)
        size = check_whole_number("batch_size", batch_size, of="samples", at_least=1)
        self._group = size * check_whole_number("batches", batches, of="batches in a group", at_least=1)
        self.seed = seed
        self.algorithm = f"length-grouped-1 {self._group} {_digest(self._lengths)}"

    def __len__(self) -> int:
        return len(self._lengths)

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        """Return the indices of an epoch from a position on."""
        group, within = divmod(_check_start(start, self), self._group)
        order = Permutation(len(self), seed if self.seed is None else self.seed, epoch).iter_from(group * self._group)
        return islice(chain.from_iterable(self._groups(order)), within, None)

    def _groups(self, order: Iterator[int]) -> Iterator[list[int]]:
        while chosen := list(islice(order, self._group)):
            longest_first = np.argsort(-self._lengths[chosen], kind="stable")
            yield [chosen[place] for place in longest_first.tolist()]


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches of as many samples as fit into a number of tokens, padding included.

    In every epoch, samples of one padded length are batched in another combination, and the batches have another order;
    their number is constant. Both are pure functions of seed and epoch, so starting at any position reads no data.
    Several ranks get complete batches in turn. Use it as `loader_params={"batch_sampler": ...}`.

    Args:
        lengths: the length of each sample in tokens: integers, at least 1, [samples].
        tokens: maximum of a batch: its samples times its largest padded length.
        multiple_of: lengths are padded to a multiple of this. A larger value makes more samples equally long.
        max_samples: maximum of a batch; None for no maximum.
        shuffle: a new order of the batches in every epoch; otherwise the shortest samples come first.
        drop_last: with several ranks, whether an incomplete last round is dropped.
        seed: instead of the run's seed.

    Raises:
        TypeError: a length is not an integer.
        ValueError: there are no samples, a sample exceeds the budget, or a number is not positive.
    """

    __repr__ = show_attributes

    def __init__(
        self,
        lengths: Any,
        tokens: int,
        *,
        multiple_of: int = 1,
        max_samples: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> None:
        multiple = check_whole_number("multiple_of", multiple_of, of="tokens", at_least=1)
        budget = check_whole_number("tokens", tokens, of="tokens", at_least=1)
        most = None if max_samples is None else check_whole_number("max_samples", max_samples, at_least=1)
        check_flag("shuffle", shuffle)
        check_flag("drop_last", drop_last)
        padded = -(-_checked(lengths, at_least=1) // multiple) * multiple
        if padded.max() > budget:
            index = int(padded.argmax())
            raise ValueError(
                f"Sample {index} has {padded[index]} tokens (padded to a multiple of {multiple}), but a batch has at "
                f"most {budget}. Allow more tokens, or truncate or remove such samples."
            )
        self._padded, self._ends = padded, _ends(np.sort(padded), budget, most)
        self.shuffle, self.drop_last, self.seed, self.epoch = shuffle, drop_last, seed, 0
        self.algorithm = f"token-budget-1 {budget} {most} {shuffle} {_digest(padded)}"

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices(self.seed or 0, self.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for a plain DataLoader."""
        self.epoch = epoch

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[list[int]]:
        """Return the batches of an epoch from a position on."""
        seed = seed if self.seed is None else self.seed
        first = _check_start(start, self)
        numbers = Permutation(len(self), seed, epoch).iter_from(first) if self.shuffle else range(first, len(self))
        ties = np.fromiter(Permutation(len(self._padded), seed, epoch, 1).iter_from(0), np.int64, len(self._padded))
        # Sort by padded length; equal lengths are in a random order of this epoch.
        order = ties[np.argsort(self._padded[ties], kind="stable")]
        for number in numbers:
            yield order[self._ends[number - 1] if number else 0 : self._ends[number]].tolist()


def _ends(ascending: Lengths, tokens: int, most: int | None) -> list[int]:
    # The end of each batch of ascending lengths.
    ends, start = list[int](), 0
    for end, length in enumerate(ascending.tolist()):
        if end > start and ((end + 1 - start) * length > tokens or end - start == most):
            ends.append(end)
            start = end
    return [*ends, len(ascending)]


def _checked(lengths: Any, *, at_least: int) -> Lengths:
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"lengths must be an integer for each sample, got {array.dtype} of the shape {list(array.shape)}: use, for "
            f"example, [len(sample) for sample in dataset]."
        )
    if array.min() < at_least:
        index = int(array.argmin())
        raise ValueError(f"A length must be at least {at_least}; sample {index} has the length {array[index]}.")
    return array.astype(np.int64)


def _digest(lengths: Lengths) -> str:
    return blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
