"""The outputs of the batches of a set, each with its place in the order of the data, and what they are joined to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...events import Engine
from .tree import Structure, difference, kinds, put_together, take_apart

Place = tuple[int, int, int, int]  # the number of a batch, its source, and from which row of that to which


class Parts:
    """Outputs by batch. They lie in memory of the CPU, which they need as much of as they are large.

    Args:
        called: what an error calls them.

    Attributes:
        structure: of what the step returns, the same for all batches; None before the first one.
        numbers: of the batches, in the order of the data.
        columns: for each leaf, that of every batch.
    """

    def __init__(self, called: str) -> None:
        self.called = called
        self.structure: Structure | None = None
        self.numbers: list[int] = []
        self.columns: list[list[Any]] = []

    def add(self, number: int, value: Any, size: int | None = None) -> None:
        """Add what a step returned for a batch.

        Args:
            number: of the batch, in the order of the data.
            value: see `take_apart`.
            size: the samples of the batch.

        Raises:
            TypeError: it is of a type that cannot be joined.
            ValueError: it is not like that of the batches before.
        """
        try:
            structure, leaves = take_apart(value, size)
        except (TypeError, ValueError) as error:
            error.add_note(f"heliograph: in {self.called}")
            raise
        if self.structure is None:
            self.structure, self.columns = structure, [[] for _ in leaves]
        elif structure != self.structure:
            raise _unlike(self.called, difference(self.structure, structure))
        self.numbers.append(number)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.append(leaf)

    def counts(self) -> list[list[int]]:
        """Return how many rows or items each leaf has of every batch."""
        return [[0 if leaf is None else len(leaf) for leaf in column] for column in self.columns]

    def clear(self) -> None:
        """Let the batches go."""
        self.numbers.clear()
        for column in self.columns:
            column.clear()

    def join(self) -> Any:
        """Return all outputs, in the order in which they were added, and let the parts go."""
        assert self.structure is not None
        leaves = [joined(kind, column) for kind, column in zip(kinds(self.structure), self.columns, strict=True)]
        self.clear()
        return put_together(self.structure, leaves)

    def gather(self, engine: Engine) -> Any:
        """Return the outputs of all ranks in the order of the data, and let the parts go. A collective.

        One leaf after the other is exchanged, so that no more than two copies of it are in memory beside the parts.

        Raises:
            ValueError: ranks have outputs that are not alike.
        """
        of_ranks: list[tuple[Structure | None, list[int], list[list[int]]]]
        of_ranks = engine.gather_objects((self.structure, self.numbers, self.counts()))
        structure = agreed([each for each, _, _ in of_ranks], self.called)
        leaves = []
        for index, kind in enumerate(kinds(structure)):
            own = joined(kind, self.columns[index] if self.columns else [])
            gathered = engine.gather(own) if kind[0] == "tensor" else engine.gather_objects(own)
            del own
            rows = [(numbers, columns[index] if columns else []) for _, numbers, columns in of_ranks]
            leaves.append(interleaved(kind, gathered, rows))
        self.clear()
        return put_together(structure, leaves)


def agreed(structures: Sequence[Structure | None], called: str) -> Structure:
    """Return the structure that all ranks have which had a batch.

    Args:
        structures: of each rank.
        called: what an error calls the outputs.

    Raises:
        ValueError: they differ.
    """
    (first, structure), *rest = [(rank, each) for rank, each in enumerate(structures) if each is not None]
    for rank, each in rest:
        if each != structure:
            raise _unlike(f"{called} on rank {first} and rank {rank}", difference(structure, each))
    return structure


def _unlike(called: str, how: str) -> ValueError:
    return ValueError(
        f"The outputs of all batches are joined, and those of {called} differ: {how}. Pad them to one length, or "
        f"return a list with an item for each sample, such as list(outputs)."
    )


def joined(kind: Structure, column: list[Any]) -> Any:
    """Return a leaf of all batches, and empty their column."""
    if kind[0] == "none":
        whole: Any = None
    elif kind[0] == "list":
        whole = [item for part in column for item in part]
    elif kind[0] == "tensor":
        whole = torch.cat(column) if column else torch.empty(0, *kind[2], dtype=getattr(torch, kind[1]))
    else:
        whole = np.concatenate(column) if column else np.empty((0, *kind[2]), dtype=kind[1])
    column.clear()
    return whole


def interleaved(kind: Structure, sources: Sequence[Any], rows: Sequence[tuple[list[int], list[int]]]) -> Any:
    """Return a leaf in the order of the data.

    Args:
        kind: of the leaf.
        sources: the leaf as each source has it, a rank or a file.
        rows: of each source, the numbers of its batches, and how many rows each of these has.
    """
    if kind[0] == "none":
        return None
    return joined(kind, [sources[source][start:end] for _, source, start, end in places(rows)])


def places(rows: Sequence[tuple[list[int], list[int]]]) -> list[Place]:
    """Return where the rows of each batch are, in the order of the batches; of one batch, in that of its adding."""
    found: list[Place] = []
    for source, (numbers, counts) in enumerate(rows):
        start = 0
        for number, count in zip(numbers, counts, strict=True):
            found.append((number, source, start, start + count))
            start += count
    return sorted(found, key=lambda place: place[0])
