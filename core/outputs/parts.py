"""The outputs of the batches of a set: taken apart into leaves, and joined in the order of the data."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...events import Engine
from ..system.extras import kind_of

Structure = list[Any]  # ["tensor", dtype, shape of a row], ["array", ...], ["list"], ["none"], or a container of these
LEAVES = ("tensor", "array", "list", "none")
ALLOWED = (
    "tensors or arrays whose first dimension is the samples, lists with an item for each sample, and dicts and tuples "
    "of these"
)
Place = tuple[int, int, int, int]  # the number of a batch, its source, and from which row of that to which


def take_apart(value: Any, size: int | None = None) -> tuple[Structure, list[Any]]:
    """Return the structure of what a step returned for a batch, and its leaves: copies of their own, on the CPU.

    Args:
        value: tensors, arrays, lists, None; dicts, tuples and named tuples of these.
        size: the samples of the batch, which rows and items are compared with; None or 1 where that is unknown.

    Raises:
        TypeError: something in it is of another type.
        ValueError: a tensor has no dimension for the samples; there are not as many rows or items as samples.
    """
    leaves: list[Any] = []
    return _take_apart(value, "", size, leaves), leaves


def put_together(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return a value of this structure; a named tuple is of a new class of the same name and fields."""
    rest = iter(leaves)
    return _put_together(structure, rest)


def kinds(structure: Structure) -> Iterator[Structure]:
    """Yield the structure of each leaf."""
    if structure[0] in LEAVES:
        yield structure
    else:
        for part in structure[-1]:
            yield from kinds(part)


def difference(one: Structure, other: Structure, path: str = "") -> str:
    """Return where two structures differ first, and how, in words."""
    parts, others = (each[-1] if each[0] not in LEAVES else [] for each in (one, other))
    if parts and one[:-1] == other[:-1] and len(parts) == len(others):
        for number, (part, another) in enumerate(zip(parts, others, strict=True)):
            if part != another:
                return difference(part, another, path + _step(one, number))
    return f"{_describe(one)} and {_describe(other)}" + (f" in {path}" if path else "")


def shape_of(value: Any) -> str:
    """Return what joined outputs are, in a few words: `{'logits': float32 [1000, 10]}`."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {shape_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shape_of, value)) + ")"
    return f"list [{len(value)}]" if isinstance(value, list) else str(value)


def on_cpu(value: Any) -> Any:
    """Return an item of a list with its tensors on the CPU; other objects are the same ones."""
    return mapped(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with its tensors changed; other objects are the same ones."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy(value)
        for key, part in value.items():
            changed[key] = mapped(part, change)
        return changed
    if not isinstance(value, list | tuple):
        return value
    make = getattr(value, "_make", type(value))
    return make(mapped(part, change) for part in value)


def _take_apart(value: Any, path: str, size: int | None, leaves: list[Any]) -> Structure:
    if isinstance(value, Tensor | np.ndarray):
        return _take_rows(value, path, size, leaves)
    if value is None:
        leaves.append(None)
        return ["none"]
    if isinstance(value, list):
        _check_number(len(value), "items", path, size)
        leaves.append([on_cpu(each) for each in value])
        return ["list"]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"Outputs are by names or numbers; got the keys {list(value)[:5]}{_where(path)}.")
        return ["dict", [*value], [_take_apart(each, f"{path}[{key!r}]", size, leaves) for key, each in value.items()]]
    if not isinstance(value, tuple):
        raise TypeError(
            f"Outputs of a batch are {ALLOWED}; got {kind_of(value)}{_where(path)}. Put other objects into a "
            f"list, one for each sample."
        )
    parts = [_take_apart(each, f"{path}[{number}]", size, leaves) for number, each in enumerate(value)]
    fields = getattr(value, "_fields", None)
    return ["tuple", parts] if fields is None else ["named", type(value).__name__, list(fields), parts]


def _take_rows(value: Any, path: str, size: int | None, leaves: list[Any]) -> Structure:
    if not value.ndim:
        raise ValueError(
            f"Outputs of a batch are {ALLOWED}; got a single number{_where(path)}. For a mean over the batches, call "
            f"run.track(name, value)."
        )
    _check_number(len(value), "rows", path, size)
    if isinstance(value, np.ndarray):
        leaves.append(value.copy())
        return ["array", value.dtype.str, list(value.shape[1:])]
    if value.layout is not torch.strided:
        raise ValueError(f"Outputs are dense tensors, got one of {value.layout}{_where(path)}: give value.to_dense().")
    leaves.append(on_cpu(value))
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape[1:])]


def _check_number(number: int, what: str, path: str, size: int | None) -> None:
    """Raise ValueError where there are not as many rows or items as samples; a size of 1 may be that of any object."""
    if size is not None and size > 1 and number != size:
        raise ValueError(
            f"Outputs of a batch are {ALLOWED}; got {number} {what} for {size} samples{_where(path)}. Return parts "
            f"that all have as a tuple, and transpose what has the samples in another dimension; if the batch has not "
            f"{size} samples, count them in the task: def batch_size(self, batch)."
        )


def _put_together(structure: Structure, rest: Iterator[Any]) -> Any:
    kind = structure[0]
    if kind in LEAVES:
        return next(rest)
    parts = [_put_together(part, rest) for part in structure[-1]]
    if kind == "dict":
        return dict(zip(structure[1], parts, strict=True))
    return namedtuple(structure[1], structure[2])(*parts) if kind == "named" else tuple(parts)


def _step(structure: Structure, number: int) -> str:
    return f"[{structure[1][number]!r}]" if structure[0] == "dict" else f"[{number}]"


def _where(path: str) -> str:
    return f" in {path}" if path else ""


def _describe(structure: Structure) -> str:
    kind = structure[0]
    if kind in ("tensor", "array"):
        return f"{structure[1]} rows of shape {structure[2]}"
    if kind == "dict":
        return f"a dict with the keys {structure[1]}"
    return {"list": "a list", "none": "None"}.get(kind, f"a tuple of {len(structure[-1])}")


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
