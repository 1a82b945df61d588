"""The batches of a block, as a table of numbers, so that a block is computed in few calls."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TypeAlias

import numpy as np
import torch
from heliograph.core.metrics.window_losses import Fetched
from numpy.typing import NDArray
from torch import Tensor

from ..format.digests import COLUMNS
from .batches import SMALL, BatchSums, checksums_of
from .chain import FACTOR, LIMIT
from .checksums import Numbers, Rows, Sum

BLOCK = 256  # batches, at most
PLACE, RATE, FIRST = 2, 2, 3  # columns: epoch and batch before the second, the learning rate, and those of a digest
BATCH, SAMPLES, DRAWS, OPTIONS, LOSS, GRADIENTS, WEIGHTS = range(FIRST, FIRST + len(COLUMNS))
WIDTH = FIRST + len(COLUMNS)
WITH_LOSS, WITH_BITS = Struct("=QQdQQQQdQQ"), Struct("=QQdQQQQQQQ")  # a row: a loss that is a number, or its checksum
NO_SUMS: NDArray[np.int64] = np.zeros(0, np.int64)
HALF, LOWER = np.uint64(32), np.uint64(2**32 - 1)
SPREAD = np.uint64(FACTOR)  # odd: no two numbers become one, and each bit acts on the upper half
WHOLE = np.isin(np.arange(FIRST, WIDTH), (SAMPLES, DRAWS))  # of 32 bits from the start
CHAINED = [each - FIRST for each in (BATCH, DRAWS, OPTIONS, LOSS)]
Table64: TypeAlias = NDArray[np.uint64]


class Table:
    """The batches of a block.

    Attributes:
        rows: how many there are.
        waiting: how many numbers of them lie on a device.
    """

    def __init__(self) -> None:
        self.rows = self.waiting = 0
        self._numbers = bytearray(BLOCK * WITH_BITS.size)
        self._sums: list[tuple[int, BatchSums]] = []  # of the batches of which more than a checksum is known
        self._later: list[tuple[int, int, Tensor]] = []  # what lies on a device: row, column, number
        self._fetched: Fetched | None = None

    def add(
        self, epoch: int, batch: int, rate: float, loaded: BatchSums, draws: int, options: Sum, loss: Sum | float,
        gradients: Sum, weights: Sum,
    ) -> None:  # fmt: skip
        """Add a batch: its place, the learning rate, what was read of it, and the checksums of the other columns."""
        crc, small, sums = loaded
        if sums:
            self._sums.append((self.rows, loaded))
            self.waiting += sum(map(len, sums))
        rest: tuple[int | float | Tensor, ...] = options, loss, gradients, weights
        are_here = options.__class__ is gradients.__class__ is weights.__class__ is int
        if loss.__class__ is not float or not are_here:
            rest = tuple(self._now(column, number) for column, number in enumerate(rest, OPTIONS))
        row = WITH_LOSS if rest[1].__class__ is float else WITH_BITS
        row.pack_into(self._numbers, self.rows * row.size, epoch, batch, rate, crc, small, draws, *rest)
        self.rows += 1

    def _now(self, column: int, number: Sum | float) -> int | float:
        """Return a number; of one that lies on a device 0, and note it."""
        if not isinstance(number, Tensor):
            return number
        self._later.append((self.rows, column, number))
        return 0

    def send(self) -> None:
        """Begin to copy what lies on a device."""
        sums = [each for _, (_, _, rows) in self._sums for each in rows if isinstance(each, Tensor)]
        held = [each.reshape(-1) for each in (*sums, *(number for _, _, number in self._later))]
        self._fetched = Fetched(torch.cat([each.to(held[0].device) for each in held])) if held else None

    @property
    def is_there(self) -> bool:
        """Whether that has arrived."""
        return self._fetched is None or self._fetched.is_there

    def numbers(self) -> Table64:
        """Return all numbers, (batches, columns); waits for what lies on a device."""
        numbers = np.frombuffer(self._numbers, np.uint64, self.rows * WIDTH).reshape(self.rows, WIDTH)
        numbers[:, BATCH] <<= HALF
        numbers[:, SAMPLES] %= SMALL
        arrived = Arrived(NO_SUMS if self._fetched is None else self._fetched.wait().cpu().numpy())
        for row, (crc, small, sums) in self._sums:
            numbers[row, [BATCH, SAMPLES]] = checksums_of(crc, small, map(arrived.numbers, sums))
        for row, column, number in self._later:
            numbers[row, column] = int(arrived.numbers(number)[0]) % LIMIT or 1
        return numbers


class Arrived:
    """Numbers that have arrived from a device, given out in their order, each in the place of its tensor."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._at = numbers, 0

    def numbers(self, given: Rows) -> Numbers:
        """Return those of a tensor; what is an array is there already."""
        if not isinstance(given, Tensor):
            return given
        begin = self._at
        self._at += given.numel()
        return self._numbers[begin : self._at]


def words_of(numbers: Table64) -> Table64:
    """Return 32 bits of each checksum, on which every bit acts; never 0, which is for one not taken."""
    bits = numbers[:, FIRST:]
    words = np.where(WHOLE, bits & LOWER, (bits * SPREAD) >> HALF)
    words[(words == 0) & (WHOLE | (bits != 0))] = 1
    return words


def links_of(numbers: Table64, words: Table64) -> Table64:
    """Return what the chain takes of each batch: its place, and the words that every batch has."""
    return np.concatenate((numbers[:, :PLACE], words[:, CHAINED]), axis=1)


def columns_of(words: Table64) -> Mapping[str, Sequence[int]]:
    """Return the words by the names of their columns."""
    return {name: array("I", column.tobytes()) for name, column in zip(COLUMNS, words.astype("=u4").T, strict=True)}


def rates_of(numbers: Table64) -> Sequence[float]:
    """Return the learning rates."""
    return array("d", numbers[:, RATE].tobytes())
