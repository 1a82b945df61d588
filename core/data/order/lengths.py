"""Samples of unequal length, such as texts: batches of similar lengths, and batches with a token budget."""

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
