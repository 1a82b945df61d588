"""Every value in a nested one, down to the last bit, to be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLE = 4096  # numbers of a tensor
SCALARS = (bool, int, float, complex, str, bytes, NoneType, np.generic)
NAMED = (type, FunctionType, BuiltinFunctionType, ModuleType)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a scalar, a tensor or an array. Two are equal if kind and digest are.

    Attributes:
        kind: type, dtype and shape, in words.
        digest: of all bits.
        sample: for messages: the scalar, or numbers of the tensor (some, if it is large); None if there are none.
    """

    kind: str
    digest: bytes
    sample: Any = field(compare=False)


Leaves = Mapping[str, Leaf]


def leaves(value: Any) -> dict[str, Leaf]:
    """Return every value in a nested one by its path: `model.0.weight`, `[1].label`."""
    return {path.lstrip("."): leaf for path, leaf in _walk(value, "", ())}


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, Tensor):
        yield path, _tensor_leaf(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        sample = value.reshape(-1)[:: 1 + value.size // SAMPLE]
        numbers = sample.astype(np.float64) if value.dtype.kind in "biuf" else None
        yield path, Leaf(f"{value.dtype} of shape {list(value.shape)}", _digest(value.tobytes()), numbers)
    elif isinstance(value, SCALARS):
        yield path, Leaf(type(value).__name__, _digest(repr(value).encode()), value)
    elif isinstance(value, NAMED):
        name = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value.__name__
        yield path, Leaf("name", name.encode(), name)
    elif id(value) not in above:  # what contains itself is walked once
        for key, part in _parts(value):
            yield from _walk(part, f"{path}{key}", (*above, id(value)))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container or another object, with the last items of their paths."""
    if isinstance(value, Mapping):
        yield from ((f".{key}" if isinstance(key, str) else f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | np.ndarray):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(sorted(value, key=repr)))
    else:
        yield from _pickle_parts(value)


def _pickle_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickle would save of an object; for one that it refuses, its type."""
    try:
        reduced = value.__reduce_ex__(4)
    except TypeError:
        reduced = type(value).__qualname__
    if isinstance(reduced, str):
        yield "", reduced
        return
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    yield "()", [function, *arguments]
    yield "", state
    yield "[]", [*(items or ()), *(pairs or ())]


def _tensor_leaf(value: Tensor) -> Leaf:
    dense = value.detach().to("cpu")
    flat = (dense if dense.layout is torch.strided else dense.to_dense()).contiguous().flatten()
    sample = flat[:: 1 + flat.numel() // SAMPLE]
    numbers = torch.view_as_real(sample) if sample.is_complex() else sample
    return Leaf(
        f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}",
        _digest(flat.view(torch.uint8).numpy().data),
        numbers.to(torch.float64, copy=True).numpy(),
    )


def _digest(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
