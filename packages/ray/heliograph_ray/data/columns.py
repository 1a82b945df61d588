"""Rows of a Ray dataset as arrays by column, and batches of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

Columns = dict[str, np.ndarray[Any, Any]]
Batch = dict[str, Tensor] | list[Tensor]


def length(columns: Columns) -> int:
    """Return the number of rows."""
    return len(next(iter(columns.values()))) if columns else 0


def select_rows(columns: Columns, rows: Any) -> Columns:
    """Return some rows, by a slice or by an array of indices."""
    return {name: values[rows] for name, values in columns.items()}


def concatenate(pieces: Sequence[Columns]) -> Columns:
    """Return the rows of all pieces in their order."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


class RowBuffer:
    """A first-in, first-out buffer of a rank's rows.

    Attributes:
        rows: the number of rows in it.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._pieces: deque[Columns] = deque()

    def add(self, piece: Columns | None) -> None:
        """Append rows."""
        if piece is not None and (rows := length(piece)):
            self._pieces.append(piece)
            self.rows += rows

    def pop(self, rows: int) -> Columns:
        """Remove and return the oldest rows, so many or all."""
        popped: list[Columns] = []
        while rows and self._pieces:
            piece = self._pieces.popleft()
            if length(piece) > rows:
                self._pieces.appendleft(select_rows(piece, slice(rows, None)))
            popped.append(select_rows(piece, slice(rows)))
            rows -= length(popped[-1])
            self.rows -= length(popped[-1])
        return concatenate(popped)


def make_batcher(names: Sequence[str] | None, collate_fn: Callable[[Any], Any] | None) -> Callable[[Columns], Any]:
    """Return the function that makes a batch: the user's, or one that returns tensors by name or in order of names."""
    return partial(_tensors, names=names) if collate_fn is None else collate_fn


def digest(columns: Columns) -> str:
    """Return a digest of rows, which does not depend on the blocks that they are in."""
    hasher = blake2b(digest_size=8)
    for name, values in sorted(columns.items()):
        hasher.update(f"{name} {values.dtype} {values.shape}".encode())
        hasher.update(repr(values.tolist()).encode() if values.dtype.hasobject else np.ascontiguousarray(values).data)
    return hasher.hexdigest()


def _tensors(columns: Columns, names: Sequence[str] | None) -> Batch:
    tensors = {name: _tensor(name, values) for name, values in columns.items()}
    return tensors if names is None else [tensors[name] for name in names]


def _tensor(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    if values.dtype.kind not in "biufc":
        raise TypeError(
            f"Column {name!r} of the Ray dataset has the dtype {values.dtype}, which no tensor has: name the columns "
            f"of a batch, loader_params={{'columns': ['x', 'y']}}, or give a collate_fn, which gets columns as arrays."
        )
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # Ray's own memory is read-only
