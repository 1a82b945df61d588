"""A digest of the last batch before a save: a loader that is read again must yield the same batch there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count, islice
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ...events import Progress
from ..objects.equality import VALUES, tensor_bytes
from .source import Source
from .users_code import attributes

COMPLETE = 2**20  # bytes: a larger batch is sampled
SAMPLE = 2**16
MOST = 10_000  # values
FEW = 64  # parts of a container
DEPTH, OBJECT = 8, 2  # search depth in containers, and in other objects, which may reach the whole program


class LoadedBatch(NamedTuple):
    """A batch as the loader yielded it.

    Attributes:
        number: within the epoch, from 1.
        versions: of its tensors, to detect changes in place.
        container: a batch of tensors only, or a copy if the task could change it.
        leaves: the values of any other batch by place, so that changes of containers by the task are not seen.
    """

    number: int
    versions: list[int]
    container: Any = None
    leaves: list[tuple[str, Any]] | None = None

    @classmethod
    def of(cls, number: int, batch: Any) -> Self:
        kind = batch.__class__
        if kind is Tensor:
            return cls(number, [_version(batch)], batch)
        if (kind is tuple or kind is list or kind is dict) and len(batch) <= FEW:  # nearly always: 2 us faster
            versions: list[int] = []
            for part in batch.values() if kind is dict else batch:
                if part.__class__ is not Tensor:
                    break
                versions.append(_version(part))
            else:
                return cls(number, versions, batch if kind is tuple else batch.copy())
        leaves = list(islice(_leaves(batch, "", DEPTH), MOST))
        return cls(number, _versions(leaves), leaves=leaves)

    @property
    def digest(self) -> bytes | None:
        # Of all bytes up to 1 MiB, otherwise of a sample and the sizes; None after a change in place.
        leaves = list(_leaves(self.container, "", DEPTH)) if self.leaves is None else self.leaves
        if _versions(leaves) != self.versions:
            return None
        size = sum(_bytes_in(value) for _, value in leaves)
        step = 1 if size <= COMPLETE else round(size / SAMPLE)
        state = blake2b(digest_size=16)
        for place, value in leaves:
            state.update(f"{place}\0".encode())
            if isinstance(value, Tensor | np.ndarray):
                state.update(f"{value.dtype}{list(value.shape)}".encode())
                state.update(_sample(value, step))
            elif isinstance(value, VALUES):
                state.update(f"{type(value).__name__}:{value!r}".encode())
        return state.digest()


class LastBatch:
    """Follows the batches of a loader without a seekable position; keeps none longer than the loop does."""

    def __init__(self) -> None:
        self._batches: deque[LoadedBatch] = deque()
        self._replayed: tuple[int, bytes | None] | None = None

    def follow(self, batches: Iterator[Any], progress: Progress, source: Source | None = None) -> Iterator[Any]:
        self._batches.clear()
        for number in count(progress.batch + 1):
            while self._batches and self._batches[0].number <= progress.batch:  # done with
                self._batches.popleft()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._batches.append(LoadedBatch.of(number, batch if source is None else source.compared(batch, number)))
            yield batch
            del batch

    def set_position(self, number: int, digest: bytes | None) -> None:
        self._batches.clear()
        self._replayed = number, digest

    def read_again(self, number: int, batch: Any) -> bytes | None:
        digest = LoadedBatch.of(number, batch).digest
        self.set_position(number, digest)
        return digest

    def digest(self, number: int) -> bytes | None:
        # None if the batch is not available or was changed in place.
        for batch in self._batches:
            if batch.number == number:
                return batch.digest
        return self._replayed[1] if self._replayed is not None and self._replayed[0] == number else None


def _bytes_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()  # a sparse tensor is read as a dense one
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _sample(value: Any, step: int) -> bytes | memoryview:
    if isinstance(value, Tensor):
        dense = value if value.layout is torch.strided else value.to_dense()
        return tensor_bytes(dense.reshape(-1)[::step])
    return b"" if value.dtype.hasobject else value.reshape(-1)[::step].tobytes()


def _versions(leaves: Sequence[tuple[str, Any]]) -> list[int]:
    return [_version(value) for _, value in leaves if isinstance(value, Tensor)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Tensor, np.ndarray, *VALUES)) or not depth:
        yield place, value
        return
    if isinstance(value, list | tuple):
        yield place, len(value)
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif isinstance(value, Mapping):
        parts = value.items()
    else:
        yield place, type(value).__qualname__
        parts, depth = attributes(value), min(depth, OBJECT)
    for key, part in islice(parts, FEW):
        yield from _leaves(part, f"{place}.{key}", depth - 1)


T = TypeVar("T")


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    ahead, end = iter(batches), object()
    batch = next(ahead, end)
    while batch is not end:
        following = next(ahead, end)
        yield cast("T", batch), following is end
        batch = following


def mark_last(batches: Iterable[T], mark: Callable[[bool], None], *, ahead: bool = True) -> Iterator[T]:
    # Calls `mark` before each batch, with whether it is the last as far as known.
    for batch, is_last in with_last(batches) if ahead else ((batch, False) for batch in batches):
        mark(is_last)
        yield batch
