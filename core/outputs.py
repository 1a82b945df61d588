"""Outputs of steps: flattened into leaves, kept by batch, joined in the order of the data, gathered from the ranks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..events import Engine
from .metrics.metric_objects import for_tensors
from .system.extras import kind_of

Structure = list[Any]  # ["tensor", dtype, shape of a row], ["array", ...], ["list"], ["none"], or a container of these
LEAVES = ("tensor", "array", "list", "none")
ALLOWED = "tensors or arrays of shape (samples, ...), lists with an item for each sample, and dicts and tuples of these"
Key = tuple[str, str]  # (set, name)


def take_apart(value: Any, size: int | None = None) -> tuple[Structure, list[Any]]:
    """Return the structure of the outputs of a batch, and its leaves, copied to the CPU.

    Args:
        value: tensors, arrays, lists, None; dicts, tuples and named tuples of these.
        size: the samples of the batch, which must equal the rows and items; None or 1 if unknown.

    Raises:
        TypeError: a value has another type.
        ValueError: a tensor has no sample dimension, or the number of rows or items differs from the samples.
    """
    leaves: list[Any] = []
    return _take_apart(value, "", size, leaves), leaves


def put_together(structure: Structure, leaves: Iterable[Any]) -> Any:
    # A named tuple is of a new class with the same name and fields.
    remaining, kind = iter(leaves), structure[0]
    if kind in LEAVES:
        return next(remaining)
    parts = [put_together(part, remaining) for part in structure[-1]]
    if kind == "dict":
        return dict(zip(structure[1], parts, strict=True))
    return namedtuple(structure[1], structure[2])(*parts) if kind == "named" else tuple(parts)


def kinds(structure: Structure) -> Iterator[Structure]:
    if structure[0] in LEAVES:
        yield structure
    else:
        for part in structure[-1]:
            yield from kinds(part)


def shape_of(value: Any) -> str:
    # A short description of joined outputs: `{'logits': float32 [1000, 10]}`.
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {shape_of(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shape_of, value)) + ")"
    return f"list [{len(value)}]" if isinstance(value, list) else str(value)


def _take_apart(value: Any, path: str, size: int | None, leaves: list[Any]) -> Structure:
    where = f" in {path}" if path else ""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"The keys of outputs must be str or int; got the keys {list(value)[:5]}{where}.")
        return ["dict", [*value], [_take_apart(part, f"{path}[{key!r}]", size, leaves) for key, part in value.items()]]
    if isinstance(value, tuple):
        parts = [_take_apart(part, f"{path}[{number}]", size, leaves) for number, part in enumerate(value)]
        fields = getattr(value, "_fields", None)
        return ["tuple", parts] if fields is None else ["named", type(value).__name__, list(fields), parts]
    if not isinstance(value, Tensor | np.ndarray | list | None):
        raise TypeError(f"Outputs of a batch are {ALLOWED}; got {kind_of(value)}{where}: use a list.")
    structure: Structure = ["none" if value is None else "list"]
    if isinstance(value, Tensor | np.ndarray):
        if not value.ndim:
            raise ValueError(f"Outputs of a batch are {ALLOWED}; got a single number{where}: call run.track.")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise ValueError(f"Outputs are dense tensors, got one of {value.layout}{where}: give value.to_dense().")
        dtype = value.dtype.str if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")
        structure = ["array" if isinstance(value, np.ndarray) else "tensor", dtype, list(value.shape[1:])]
    if value is not None and size is not None and size > 1 and len(value) != size:  # 1 may be the size of any object
        unit = "items" if isinstance(value, list) else "rows"
        raise ValueError(
            f"Outputs of a batch are {ALLOWED}; got {len(value)} {unit} for {size} samples{where}. Return several "
            f"outputs as a tuple; for a batch of another size, define batch_size(self, batch) in the task."
        )
    if isinstance(value, np.ndarray):
        leaves.append(value.copy())
    else:
        leaves.append(for_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), value))
    return structure


class OutputParts:
    """Outputs by batch, in CPU memory.

    Args:
        called: the name of the outputs in errors.

    Attributes:
        structure: of the outputs, the same for all batches; None before the first.
        numbers: of the batches, in the order of the data.
        columns: the values of all batches, for each leaf.
    """

    def __init__(self, called: str) -> None:
        self.called = called
        self.structure: Structure | None = None
        self.numbers: list[int] = []
        self.columns: list[list[Any]] = []

    def add(self, number: int, value: Any, size: int | None = None) -> None:
        """Add the outputs of a batch.

        Args:
            number: of the batch, in the order of the data.
            value: see `take_apart`.
            size: the samples of the batch.

        Raises:
            TypeError: outputs of this type cannot be joined.
            ValueError: the structure differs from earlier batches.
        """
        try:
            structure, leaves = take_apart(value, size)
        except (TypeError, ValueError) as error:
            error.add_note(f"heliograph: in {self.called}")
            raise
        if self.structure is None:
            self.structure, self.columns = structure, [[] for _ in leaves]
        elif structure != self.structure:
            raise _unlike(self.called, self.structure, structure)
        self.numbers.append(number)
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.append(leaf)

    def counts(self) -> list[list[int]]:
        return [[0 if leaf is None else len(leaf) for leaf in column] for column in self.columns]

    def clear(self) -> None:
        self.numbers.clear()
        for column in self.columns:
            column.clear()

    def join(self) -> Any:
        assert self.structure is not None
        leaves = [joined(kind, column) for kind, column in zip(kinds(self.structure), self.columns, strict=True)]
        self.clear()
        return put_together(self.structure, leaves)

    def gather(self, engine: Engine) -> Any:
        """Return the outputs of all ranks in the order of the data, and clear the parts. A collective.

        The leaves are exchanged one after another, so that at most two copies of a leaf are in memory.

        Raises:
            ValueError: the ranks have outputs of different structure.
        """
        of_ranks: list[tuple[Structure | None, list[int], list[list[int]]]]
        of_ranks = engine.gather_objects((self.structure, self.numbers, self.counts()))
        structure = agreed([rank_structure for rank_structure, _, _ in of_ranks], self.called)
        leaves = []
        for index, kind in enumerate(kinds(structure)):
            leaf = joined(kind, self.columns[index] if self.columns else [])
            gathered = engine.gather(leaf) if kind[0] == "tensor" else engine.gather_objects(leaf)
            del leaf
            rows = [(numbers, columns[index] if columns else []) for _, numbers, columns in of_ranks]
            leaves.append(interleaved(kind, gathered, rows))
        self.clear()
        return put_together(structure, leaves)


def agreed(structures: Sequence[Structure | None], called: str) -> Structure:
    """Return the common structure of the ranks that had a batch.

    Args:
        structures: of each rank.
        called: the name of the outputs in errors.

    Raises:
        ValueError: they differ.
    """
    (first, structure), *more = [
        (rank, candidate) for rank, candidate in enumerate(structures) if candidate is not None
    ]
    for rank, candidate in more:
        if candidate != structure:
            raise _unlike(f"{called} on rank {first} and rank {rank}", structure, candidate)
    return structure


def _unlike(called: str, first: Structure, second: Structure) -> ValueError:
    return ValueError(
        f"The outputs of {called} cannot be joined, because they differ: {first!s:.300} and {second!s:.300}. Pad them "
        f"to one length, or return a list with an item for each sample, such as list(outputs)."
    )


def joined(kind: Structure, column: list[Any]) -> Any:
    # Clears the column, to free memory.
    if kind[0] == "none":
        leaf: Any = None
    elif kind[0] == "list":
        leaf = [item for part in column for item in part]
    elif kind[0] == "tensor":
        leaf = torch.cat(column) if column else torch.empty(0, *kind[2], dtype=getattr(torch, kind[1]))
    else:
        leaf = np.concatenate(column) if column else np.empty((0, *kind[2]), dtype=kind[1])
    column.clear()
    return leaf


def interleaved(kind: Structure, sources: Sequence[Any], rows: Sequence[tuple[list[int], list[int]]]) -> Any:
    """Return a leaf in the order of the data.

    Args:
        kind: of the leaf.
        sources: the leaf of each source, which is a rank or a file.
        rows: for each source, the numbers of its batches, and the number of rows of each batch.
    """
    if kind[0] == "none":
        return None
    batches: list[tuple[int, Any]] = []
    for leaf, (numbers, counts) in zip(sources, rows, strict=True):
        start = 0
        for number, count in zip(numbers, counts, strict=True):
            batches.append((number, leaf[start : start + count]))
            start += count
    batches.sort(key=itemgetter(0))
    return joined(kind, [part for _, part in batches])


class Collected(dict[str, Any]):
    """Collected values by name; `<set>/<name>` for a named set."""

    def __missing__(self, name: str) -> NoReturn:
        names = f"collected: {', '.join(map(repr, self))}" if self else "nothing was collected"
        raise KeyError(f"There is no collected value {name!r}; {names}. Call run.collect({name!r}, value) in a step.")


class Collection:
    """The values that an evaluation collects.

    Args:
        rank: of this process, among `world_size` processes that share the batches of a set in turn.
        world_size: the number of processes.
        low: the dtype of autocast, in which nothing is stored; None without autocast.

    Attributes:
        dataset: the current set.
        is_dealt: whether its batches are divided among the ranks.
        batch: the number of batches of the set on this process before the current one; None outside of the sets.
        whole: the collected values, after all sets are complete.
    """

    def __init__(self, rank: int, world_size: int, low: torch.dtype | None = None) -> None:
        self.dataset, self.is_dealt, self.whole = "", True, Collected()
        self.batch: int | None = None
        self._rank, self._world_size, self._low = rank, world_size, low
        self._parts: dict[Key, OutputParts] = {}

    @property
    def number(self) -> int:
        assert self.batch is not None
        return self.batch * self._world_size + self._rank

    @property
    def place(self) -> str:
        # For error messages: ` (batch 4 of set 'a')`; empty outside of the batches.
        if self.batch is None:
            return ""
        return f" (batch {self.batch}{f' of set {self.dataset!r}' if self.dataset else ''})"

    def add(self, name: str, value: Any, size: int) -> None:
        """Store a copy of a value of the current batch, on the CPU.

        Args:
            name: of the value.
            value: see `heliograph.Run.collect`.
            size: the samples of the batch.

        Raises:
            RuntimeError: there is no current batch.
            TypeError: values of this type cannot be joined.
            ValueError: the name is invalid, the value differs in structure from earlier ones, or its position in the
                order of the data is unknown.
        """
        if self.batch is None:
            raise RuntimeError("run.collect needs a current batch: call it in the step, or in a handler of its events.")
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"run.collect takes a name without '/', such as 'logits'; got {name!r}.")
        self.check_order("collected")
        value = self.widen(value)
        self._parts.setdefault((self.dataset, name), _parts(name)).add(self.number, value, size)

    def widen(self, value: Any) -> Any:
        # NumPy may not have the dtype of autocast.
        if self._low is None:
            return value
        return for_tensors(lambda tensor: tensor.float() if tensor.dtype == self._low else tensor, value)

    def check_order(self, done: str) -> None:
        if not self.is_dealt:
            called = f"set {self.dataset!r}" if self.dataset else "loader"
            raise ValueError(
                f"All {self._world_size} ranks read the whole {called}, so the {done} values have no order. Give a "
                f"list, a dataset with loader_params, or a DataLoader without a distributed sampler."
            )

    @property
    def keys(self) -> list[Key]:
        return list(self._parts)

    def join(self) -> None:
        self._finish({key: parts.join() for key, parts in self._parts.items()})

    def gather(self, keys: Iterable[Key], engine: Engine) -> None:
        """Join what all ranks have collected. A collective.

        Args:
            keys: the union over all ranks, the same on each.
            engine: connects the ranks.
        """
        self._finish({key: self._parts.get(key, _parts(key[1])).gather(engine) for key in sorted(keys)})

    def hold(self, dataset: str, values: Mapping[str, Any]) -> None:
        # A value that was collected under the same name wins.
        self.whole = Collected({_named(dataset, name): value for name, value in values.items()} | self.whole)

    def _finish(self, joined: dict[Key, Any]) -> None:
        self._parts.clear()
        self.whole.update({_named(*key): value for key, value in joined.items()})


def _named(dataset: str, name: str) -> str:
    return f"{dataset}/{name}" if dataset else name


def _parts(name: str) -> OutputParts:
    return OutputParts(f"run.collect({name!r}, ...)")
