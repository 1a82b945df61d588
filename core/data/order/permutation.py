"""Orders of many samples that can be entered at any place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..draws.generators import digest

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
        self._block = _shuffled(size, key) if size <= _LARGEST_SHUFFLED else _feistel(size, key)

    def iter_from(self, start: int) -> Iterator[int]:
        """Yield the numbers from a position on, to the end."""
        for at in range(start, self.size, _BLOCK):
            yield from self._block(at, min(at + _BLOCK, self.size)).tolist()


def _shuffled(size: int, key: tuple[int, ...]) -> Callable[[int, int], npt.NDArray[np.integer]]:
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
            total = halves[side] + _hashed(halves[1 - side], round_key, sizes[side])
            halves[side] = np.minimum(total, total - sizes[side])  # where it was smaller, it wrapped round to huge
        return halves[0] * sizes[1] + halves[1]

    def block(start: int, stop: int) -> Positions:
        numbers = permuted(np.arange(start, stop, dtype=np.uint64))
        while (outside := numbers >= size).any():
            numbers[outside] = permuted(numbers[outside])
        return numbers

    return block


def _hashed(values: Positions, round_key: np.uint64, size: np.uint64) -> Positions:
    """Return a number below size for each value."""
    mixed = (values ^ round_key) * _MULTIPLIER
    mixed ^= mixed >> _HIGH
    mixed *= _MIXER
    return ((mixed >> _HIGH) * size) >> _HIGH  # of 32 bits, so that the product fits into 64
