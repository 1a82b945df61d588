"""The number of samples in a batch of any structure: the common first dimension of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...events.checks import count
from ..objects.equality import SCALARS
from .users_code import attributes

_PLAIN: Final = (*SCALARS, np.generic, type, torch.nn.Module)  # have no samples
_DECLARED: Final = ("batch_size", "num_graphs")  # attributes with the number of samples
_DEPTH, _OBJECT = 8, 3  # search depth in containers, and in other objects, which may reach the whole program
_PARTS, _ITEMS = 64, 12  # searched parts of an object or mapping, and of a list


def find_samples(batch: Any) -> tuple[int, str]:
    # Returns the number of samples, and a warning if it is in doubt.
    counts = Counter(_sizes_in(batch))
    size = max(counts, key=counts.__getitem__) if counts else _number_of_items(batch)
    if len(counts) == 1:
        return size, ""
    reason = "tensors with different first dimensions" if counts else "no tensor with a first dimension for the samples"
    return (
        size,
        f"A batch has {reason}: {_shapes_in(batch):.400}. Means are weighted as if it had "
        f"{count(size, 'sample', 'samples')}: define batch_size(self, batch) in the task.",
    )


def _sizes_in(value: Any, depth: int = _DEPTH) -> Iterator[int]:
    # The first dimension of each tensor; for some objects the declared number of samples.
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0])
    elif isinstance(value, Tensor) and value.is_nested:  # it may have no shape
        yield value.size(0)
    elif isinstance(shape := getattr(value, "shape", None), tuple):
        yield from map(int, shape[:1])
    elif sizes := [size for name in _DECLARED if isinstance(size := getattr(value, name, None), int)]:
        yield sizes[0]
    elif isinstance(value, list) and value and all(isinstance(sample, Mapping | tuple) for sample in value):
        yield len(value)  # default_collate makes lists only of tensors, lists and strings
    elif depth:
        depth = min(depth, _DEPTH if isinstance(value, list | tuple | Mapping) else _OBJECT) - 1
        for _, part in _named_parts(value):
            if not isinstance(part, _PLAIN):
                yield from _sizes_in(part, depth)


def _named_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    # (name, part) of a container or object.
    if isinstance(value, _PLAIN):
        return
    if isinstance(value, Mapping):
        yield from islice(value.items(), _PARTS)
    elif isinstance(value, list | tuple):
        yield from enumerate(value[:_ITEMS])
    else:
        yield from islice(attributes(value), _PARTS)


def _number_of_items(batch: Any) -> int:
    # The length of the first list of numbers or strings; 1 if there is none.
    if isinstance(batch, list | tuple) and (not batch or isinstance(batch[0], _PLAIN)):
        return len(batch)
    return next((_number_of_items(part) for _, part in _named_parts(batch)), 1)


def _shapes_in(value: Any, depth: int = 3) -> str:
    # For the warning.
    shape = () if isinstance(value, Tensor) and value.is_nested else getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(list(shape))
    names = [
        ("" if isinstance(value, list | tuple) else f"{name}: ") + _shapes_in(part, depth - 1)
        for name, part in islice(_named_parts(value), _PARTS if depth else 0)
    ]
    return type(value).__name__ + f"({', '.join(names)})" * bool(names)
