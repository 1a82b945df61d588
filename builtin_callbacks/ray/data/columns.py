"""Rows of a Ray dataset as arrays by column, and the batches made of them."""

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


def chosen(columns: Columns, rows: Any) -> Columns:
    """Return some rows: a slice of them, or an array of their numbers."""
    return {name: values[rows] for name, values in columns.items()}


def joined(pieces: Sequence[Columns]) -> Columns:
    """Return the rows of several pieces, one behind the other."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


class Gathered:
    """Rows that a rank has got and not yet read.

    Attributes:
        rows: how many they are.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._pieces: deque[Columns] = deque()

    def add(self, piece: Columns | None) -> None:
        """Take rows, if there are any."""
        if piece is not None and (rows := length(piece)):
            self._pieces.append(piece)
            self.rows += rows

    def take(self, rows: int) -> Columns:
        """Return so many of the oldest, or all."""
        taken: list[Columns] = []
        while rows and self._pieces:
            piece = self._pieces.popleft()
            if length(piece) > rows:
                self._pieces.appendleft(chosen(piece, slice(rows, None)))
            taken.append(chosen(piece, slice(rows)))
            rows -= length(taken[-1])
            self.rows -= length(taken[-1])
        return joined(taken)


def batcher(names: Sequence[str] | None, collate_fn: Callable[[Any], Any] | None) -> Callable[[Columns], Any]:
    """Return what makes a batch of rows: the user's function, or tensors by column or in the order of the names."""
    return partial(_tensors, names=names) if collate_fn is None else collate_fn


def digest(columns: Columns) -> str:
    """Return what tells these rows from others; it does not depend on the blocks that they came in."""
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
            f"Column {name!r} of the Ray dataset holds {values.dtype}, which no tensor holds: name those that make a "
            f"batch, loader_params={{'columns': ['x', 'y']}}, or give a collate_fn, which gets the columns as arrays."
        )
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # Ray's own memory is read-only
