"""The number of samples in a batch of any form: the first dimension that its tensors have in common."""

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

_PLAIN: Final = (*SCALARS, np.generic, type, torch.nn.Module)  # hold no samples
_DECLARED: Final = ("batch_size", "num_graphs")  # by which objects say how many samples they hold
_DEPTH, _OBJECT = 8, 3  # how deep to look: into containers, and into other objects, which may lead to the whole program
_PARTS, _ITEMS = 64, 12  # how many parts of an object or mapping to look at, and of a list
_Get = Callable[[Any], Any]


def find_samples(batch: Any) -> tuple[int, list[_Get], str]:
    """Return the number of samples in a batch, what returns the tensors that show it, and why it is in doubt."""
    found = list(_sizes_in(batch))
    counts = Counter(size for size, _ in found)
    size = max(counts, key=counts.__getitem__) if counts else _number_of_items(batch)
    if len(counts) == 1:
        tensors = [get for _, get in found if get is not None]
        return size, tensors if len(tensors) == len(found) else [], ""
    why = "tensors of different first dimensions" if counts else "no tensor whose first dimension is the samples"
    doubt = f"A batch has {why}: {_shapes_in(batch):.400}. It counts as {count(size, 'sample', 'samples')}, by which "
    return size, [], f"{doubt}means are weighted: define batch_size(self, batch) in the task."


def _sizes_in(value: Any, depth: int = _DEPTH, get: _Get | None = None) -> Iterator[tuple[int, _Get | None]]:
    """Yield the first dimension of each tensor in a batch, and what returns it; the samples that an object declares."""
    if isinstance(value, PackedSequence):
        yield int(value.batch_sizes[0]), None
    elif isinstance(value, Tensor) and value.is_nested:  # which may have no shape
        yield value.size(0), None
    elif isinstance(shape := getattr(value, "shape", None), tuple):
        yield from ((int(size), get or _itself) for size in shape[:1])
    elif sizes := [size for name in _DECLARED if isinstance(size := getattr(value, name, None), int)]:
        yield sizes[0], None
    elif isinstance(value, list) and value and all(isinstance(sample, Mapping | tuple) for sample in value):
        yield len(value), None  # default_collate makes lists only of tensors, lists and texts
    elif depth:
        depth = min(depth, _DEPTH if isinstance(value, list | tuple | Mapping) else _OBJECT) - 1
        for _, part, inner in _named_parts(value):
            if not isinstance(part, _PLAIN):
                yield from _sizes_in(part, depth, inner if get is None else _after(get, inner))


def _named_parts(value: Any) -> Iterator[tuple[Any, Any, _Get]]:
    """Yield the name of each part of a container or object, the part, and what returns it."""
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
    """Return the length of the first list of numbers or texts in a batch; 1 if it has none."""
    if isinstance(batch, list | tuple) and (not batch or isinstance(batch[0], _PLAIN)):
        return len(batch)
    return next((_number_of_items(part) for _, part, _ in _named_parts(batch)), 1)


def _shapes_in(value: Any, depth: int = 3) -> str:
    """Return the names and shapes in a batch, in a few words."""
    shape = () if isinstance(value, Tensor) and value.is_nested else getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(list(shape))
    names = [
        ("" if isinstance(value, list | tuple) else f"{name}: ") + _shapes_in(part, depth - 1)
        for name, part, _ in islice(_named_parts(value), _PARTS if depth else 0)
    ]
    return type(value).__name__ + f"({', '.join(names)})" * bool(names)
