"""What a step returns, taken apart into a structure, as plain data, and its leaves, on the CPU."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Structure = list[Any]  # ["tensor", dtype, shape of a row], ["array", ...], ["list"], ["none"], or a container of these
LEAVES = ("tensor", "array", "list", "none")
ALLOWED = (
    "tensors or arrays whose first dimension is the samples, lists with an item for each sample, and dicts and tuples "
    "of these"
)


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
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: on_cpu(each) for key, each in value.items()}
    return type(value)(map(on_cpu, value)) if type(value) in (list, tuple) else value


def _take_apart(value: Any, path: str, size: int | None, leaves: list[Any]) -> Structure:
    if isinstance(value, Tensor | np.ndarray):
        return _take_rows(value, path, size, leaves)
    if value is None:
        leaves.append(None)
        return ["none"]
    if isinstance(value, list):
        leaves.append(_items(value, path, size))
        return ["list"]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str | int) for key in value):
            raise TypeError(f"Outputs are by names or numbers; got the keys {list(value)[:5]}{_where(path)}.")
        return ["dict", [*value], [_take_apart(each, f"{path}[{key!r}]", size, leaves) for key, each in value.items()]]
    if not isinstance(value, tuple):
        raise TypeError(
            f"Outputs of a batch are {ALLOWED}; got a {type(value).__name__}{_where(path)}. Put other objects into a "
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


def _items(value: list[Any], path: str, size: int | None) -> list[Any]:
    _check_number(len(value), "items", path, size)
    return [on_cpu(each) for each in value]


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
    make: Callable[..., Any] = namedtuple(structure[1], structure[2]) if kind == "named" else _tuple
    return make(*parts)


def _tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


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
