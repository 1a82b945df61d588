"""The number of samples in a batch of any structure: the common first dimension of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ....events.errors import count
from ...objects.equality import SCALARS
from ..draws.object_parts import attributes

_PLAIN: Final = (*SCALARS, np.generic, type, torch.nn.Module)  # have no samples
_DECLARED: Final = ("batch_size", "num_graphs")  # attributes with the number of samples
_DEPTH, _OBJECT = 8, 3  # search depth in containers, and in other objects, which may reach the whole program
_PARTS, _ITEMS = 64, 12  # searched parts of an object or mapping, and of a list
_Get = Callable[[Any], Any]


def find_samples(batch: Any) -> tuple[int, list[_Get], str]:
    # Returns the number of samples, getters of the tensors that show it, and a warning if it is in doubt.
    sizes = list(_sizes_in(batch))
    counts = Counter(size for size, _ in sizes)
    size = max(counts, key=counts.__getitem__) if counts else _number_of_items(batch)
    if len(counts) == 1:
        tensors = [get for _, get in sizes if get is not None]
        return size, tensors if len(tensors) == len(sizes) else [], ""
    reason = "tensors with different first dimensions" if counts else "no tensor with a first dimension for the samples"
    return (
        size,
        [],
        f"A batch has {reason}: {_shapes_in(batch):.400}. Means are weighted as if it had "
        f"{count(size, 'sample', 'samples')}: define batch_size(self, batch) in the task.",
    )


def _sizes_in(value: Any, depth: int = _DEPTH, get: _Get | None = None) -> Iterator[tuple[int, _Get | None]]:
    # The first dimension of each tensor, and its getter; for some objects the declared number of samples.
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0]), None
    elif isinstance(value, Tensor) and value.is_nested:  # it may have no shape
        yield value.size(0), None
    elif isinstance(shape := getattr(value, "shape", None), tuple):
        yield from ((int(size), get or _itself) for size in shape[:1])
    elif sizes := [size for name in _DECLARED if isinstance(size := getattr(value, name, None), int)]:
        yield sizes[0], None
    elif isinstance(value, list) and value and all(isinstance(sample, Mapping | tuple) for sample in value):
        yield len(value), None  # default_collate makes lists only of tensors, lists and strings
    elif depth:
        depth = min(depth, _DEPTH if isinstance(value, list | tuple | Mapping) else _OBJECT) - 1
        for _, part, inner in _named_parts(value):
            if not isinstance(part, _PLAIN):
                yield from _sizes_in(part, depth, inner if get is None else _after(get, inner))


def _named_parts(value: Any) -> Iterator[tuple[Any, Any, _Get]]:
    # (name, part, getter) of a container or object.
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, Mapping):
        yield from ((key, part, itemgetter(key)) for key, part in islice(value.items(), _PARTS))
    elif isinstance(value, list | tuple):
        yield from ((index, part, itemgetter(index)) for index, part in enumerate(value[:_ITEMS]))
    else:
        yield from ((name, part, attrgetter(name)) for name, part in islice(attributes(value), _PARTS))


def _itself(batch: Any) -> Any:
    return batch


def _after(outer: _Get, inner: _Get) -> _Get:
    return lambda batch: inner(outer(batch))


def _number_of_items(batch: Any) -> int:
    # The length of the first list of numbers or strings; 1 if there is none.
    if isinstance(batch, list | tuple) and (not batch or isinstance(batch[0], _PLAIN)):
        return len(batch)
    return next((_number_of_items(part) for _, part, _ in _named_parts(batch)), 1)


def _shapes_in(value: Any, depth: int = 3) -> str:
    # For the warning.
    shape = () if isinstance(value, Tensor) and value.is_nested else getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(list(shape))
    names = [
        ("" if isinstance(value, list | tuple) else f"{name}: ") + _shapes_in(part, depth - 1)
        for name, part, _ in islice(_named_parts(value), _PARTS if depth else 0)
    ]
    return type(value).__name__ + f"({', '.join(names)})" * bool(names)
