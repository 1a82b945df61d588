"""Samples of unequal length, such as texts: batches of similar lengths, and batches of a number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ....events.checks import check_flag, check_whole_number
from ....events.signatures import show_attributes
from .samplers import Permutation, _check_start, _Seekable

Lengths = npt.NDArray[np.int64]


class LengthGroupedSampler(_Seekable):
    """Samples in a random order in which those of similar length meet in a batch, so that little is padded.

    The order of each epoch is cut into groups of `batches` times `batch_size` samples, and each group is sorted, the
    longest first, as `group_by_length` of the HF Trainer does. It is a pure function of seed and epoch; to begin
    anywhere in it, one group is sorted. Give it as `loader_params={"batch_size": ..., "sampler": ...}`.

    Args:
        lengths: the length of each sample: whole numbers, [samples].
        batch_size: samples in a batch; of several ranks, in the batches of all together.
        batches: in a group.
        seed: instead of the run's seed.

    Raises:
        TypeError: a length is not a whole number.
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
        own = seed if self.seed is None else self.seed
        order = Permutation(len(self), own, epoch).iter_from(group * self._group)
        return islice(chain.from_iterable(self._groups(order)), within, None)

    def _groups(self, order: Iterator[int]) -> Iterator[list[int]]:
        while chosen := list(islice(order, self._group)):
            longest_first = np.argsort(-self._lengths[chosen], kind="stable")
            yield [chosen[place] for place in longest_first.tolist()]


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Batches of as many samples as fit into a number of tokens, padding included; the shorter, the more.

    Samples of one padded length meet in another way in every epoch, and the batches come in another order; their number
    is always the same. Both are pure functions of seed and epoch: no data are read to begin anywhere. On several ranks
    whole batches are dealt out. Give it as `loader_params={"batch_sampler": ...}`.

    Args:
        lengths: the length of each sample in tokens: whole numbers, at least 1, [samples].
        tokens: in a batch at most: its samples times the padded length of its longest.
        multiple_of: what lengths are padded to a multiple of. The larger, the more samples count as equally long.
        max_samples: in a batch at most; None for any number.
        shuffle: whether batches come in another order in every epoch; else the shortest samples come first.
        drop_last: on several ranks, whether the last round is left out where it is not full.
        seed: instead of the run's seed.

    Raises:
        TypeError: a length is not a whole number.
        ValueError: there are no samples, a sample is longer than a batch may be, or a number is not positive.
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
                f"Sample {index} has {padded[index]} tokens, padded to a multiple of {multiple}: more than the "
                f"{budget} of a batch. Allow more tokens, or cut or leave out such samples."
            )
        self._padded, self._ends = padded, _ends(np.sort(padded), budget, most)
        self.shuffle, self.drop_last, self.seed, self.epoch = shuffle, drop_last, seed, 0
        self.algorithm = f"token-budget-1 {budget} {most} {shuffle} {_digest(padded)}"

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices(self.seed or 0, self.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order a plain DataLoader reads next."""
        self.epoch = epoch

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[list[int]]:
        """Return the batches of an epoch from a position on."""
        own = seed if self.seed is None else self.seed
        first = _check_start(start, self)
        numbers = Permutation(len(self), own, epoch).iter_from(first) if self.shuffle else range(first, len(self))
        ties = np.fromiter(Permutation(len(self._padded), own, epoch, 1).iter_from(0), np.int64, len(self._padded))
        # Sort by padded length; equal lengths are in a random order of this epoch.
        order = ties[np.argsort(self._padded[ties], kind="stable")]
        for number in numbers:
            yield order[self._ends[number - 1] if number else 0 : self._ends[number]].tolist()


def _ends(ascending: Lengths, tokens: int, most: int | None) -> list[int]:
    """Return where each batch of ascending lengths ends: as late as its longest sample times its samples fit."""
    ends, start = list[int](), 0
    while start < len(ascending):
        low, high = start + 1, min(len(ascending), start + min(most or tokens, tokens // int(ascending[start])))
        while low < high:  # the cost rises with the end, so the last that fits is found by halving
            middle = (low + high + 1) // 2
            if int(ascending[middle - 1]) * (middle - start) <= tokens:
                low = middle
            else:
                high = middle - 1
        ends.append(low)
        start = low
    return ends


def _checked(lengths: Any, *, at_least: int) -> Lengths:
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"lengths takes one length for each sample, [samples], and there is none in an array of shape "
            f"{list(array.shape)}: [len(each) for each in dataset], say."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"lengths takes whole numbers, got {array.dtype}.")
    if array.min() < at_least:
        index = int(array.argmin())
        raise ValueError(
            f"The length of a sample is at least {at_least}, but that of sample {index} is {array[index]}."
        )
    return array.astype(np.int64)


def _digest(lengths: Lengths) -> str:
    return blake2b(lengths.astype("<i8").tobytes(), digest_size=8).hexdigest()
