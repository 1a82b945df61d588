"""A digest of the last batch before a save: a loader that is read again must yield the very same batch there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from itertools import count, islice
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...events import Progress
from .sources.contract import Compound, Source

WHOLE = 2**20  # bytes: of a larger batch, a sample is taken
SAMPLE = 2**16
MOST = 10_000  # values
FEW = 64  # items: what is in longer lists is taken for plain
DEPTH, OBJECT = 8, 2  # how deep to look: into containers, and into other objects, which may know the whole program
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Given(NamedTuple):
    """A batch as the loader gave it.

    Attributes:
        number: which of the epoch, from 1.
        content: its containers are copies, so that what the task takes out of them is still there.
        versions: of its tensors: one that was changed since is not what the loader gave.
    """

    number: int
    content: Any
    versions: list[tuple[Tensor, int]]

    @classmethod
    def of(cls, number: int, batch: Any) -> Self:
        """Look at a batch before anybody else does."""
        versions: list[tuple[Tensor, int]] = []
        if type(batch) in (tuple, list) and len(batch) <= FEW:  # nearly always of tensors only: spared the search
            for each in batch:
                if type(each) is not Tensor or each.is_inference():
                    break
                versions.append((each, each._version))
            else:
                return cls(number, list(batch), versions)
            versions.clear()
        return cls(number, _copy(batch, versions, DEPTH), versions)

    @property
    def digest(self) -> bytes | None:
        """What distinguishes it from others; None where a tensor was changed in place."""
        is_untouched = all(tensor._version == version for tensor, version in self.versions)
        return digest_of(self.content) if is_untouched else None


class LastBatch:
    """Follows the batches of a loader that can only be read again; holds none for longer than the loop does."""

    def __init__(self) -> None:
        self._given: deque[Given] = deque()
        self._again: tuple[int, bytes | None] | None = None

    def follow(self, batches: Iterator[Any], progress: Progress, source: Source | None = None) -> Iterator[Any]:
        """Yield the batches of an epoch from the position on; of several streams, some parts are compared only."""
        self._given.clear()
        compared = source.compared if isinstance(source, Compound) else None
        for number in count(progress.batch + 1):
            while self._given and self._given[0].number <= progress.batch:  # done with
                self._given.popleft()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._given.append(Given.of(number, batch if compared is None else compared(batch, number)))
            yield batch
            del batch

    def set_position(self, number: int, digest: bytes | None) -> None:
        """Set the position to a batch of which only the digest is known."""
        self._given.clear()
        self._again = number, digest

    def read_again(self, number: int, batch: Any) -> bytes | None:
        """Return the digest of a batch that was read again, and note that position."""
        digest = Given.of(number, batch).digest
        self.set_position(number, digest)
        return digest

    def digest(self, number: int) -> bytes | None:
        """Return the digest of a batch of the epoch; None where it is not at hand, or was changed."""
        for given in self._given:
            if given.number == number:
                return given.digest
        return self._again[1] if self._again is not None and self._again[0] == number else None


def digest_of(content: Any) -> bytes:
    """Return a digest of values with their places: of all bytes up to 1 MiB, else of a sample and the sizes."""
    leaves = list(islice(_leaves(content, "", DEPTH), MOST))
    size = sum(value.nbytes if isinstance(value, Tensor | np.ndarray) else 0 for _, value in leaves)
    share = 1.0 if size <= WHOLE else SAMPLE / size
    state = blake2b(digest_size=16)
    for place, value in leaves:
        state.update(f"{place}\0".encode())
        for piece in _pieces(value, share):
            state.update(piece)
    return state.digest()


def _copy(value: Any, versions: list[tuple[Tensor, int]], depth: int) -> Any:
    """Return a batch with containers of its own, and note the versions of the tensors in it."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            versions.append((value, value._version))
        return value
    if isinstance(value, (np.ndarray, *PLAIN)) or not depth:
        return value
    if isinstance(value, list | tuple):
        return list(value) if len(value) > FEW else [_copy(each, versions, depth - 1) for each in value]
    if not isinstance(value, Mapping):
        depth = min(depth, OBJECT)
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if len(parts) > FEW:
        return dict(parts)
    return {"type": type(value).__qualname__} | {key: _copy(each, versions, depth - 1) for key, each in parts.items()}


def _leaves(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, arrays and plain values in a copied batch, with the place of each."""
    if isinstance(value, dict | list | tuple) and depth:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(part, f"{place}.{key}", depth - 1)
    else:
        yield place, value


def _pieces(value: Any, share: float) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        yield _sample(dense.reshape(-1), share).cpu().contiguous().view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        if not value.dtype.hasobject:
            yield _sample(value.reshape(-1), share).tobytes()
    elif isinstance(value, PLAIN):
        yield f"{type(value).__name__}:{value!r}".encode()


def _sample(flat: Any, share: float) -> Any:
    """Return some of the elements of a tensor or array, evenly spread."""
    return flat if share == 1.0 else flat[:: max(1, round(1 / share))]


T = TypeVar("T")


def with_last(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield (batch, whether it is the last), reading one item ahead."""
    ahead = iter(batches)
    try:
        batch = next(ahead)
    except StopIteration:
        return
    for following in ahead:
        yield batch, False
        batch = following
    yield batch, True


def mark_last(batches: Iterable[T], mark: Callable[[bool], None], *, ahead: bool = True) -> Iterator[T]:
    """Yield batches, each after a call of `mark` with whether it is known to be the last, reading one item ahead."""
    for batch, is_last in with_last(batches) if ahead else ((batch, False) for batch in batches):
        mark(is_last)
        yield batch
