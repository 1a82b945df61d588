"""The plain values of datasets: whether a dataset has nothing else, and a digest of them."""

from __future__ import annotations

from hashlib import blake2b
from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from ..objects.equality import VALUES
from .users_code import attributes, is_by_user, set_by_epoch

_DATA: Final = frozenset(
    {NoneType, range, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # no subclasses, which may run any code when they are read
_DATASETS: Final = frozenset({TensorDataset, Subset, ConcatDataset, StackDataset})
_ALLOWED: Final = _DATA | _NESTED | _DATASETS
_DEEPEST: Final = 16  # levels; a container may contain itself
MOST_ITEMS: Final = 1000  # of a longer container only the length enters the digest
MOST_PARTS: Final = 50_000  # in the digest, the outermost first: some tens of milliseconds


def is_plain_data(dataset: Any, collate: Any) -> bool:
    """True if a dataset is pure data, so that reading and collating it runs no code that could draw.

    Pure data are torch's own datasets, lists and tuples of tensors, arrays, numbers and strings, nested in any way, of
    exactly these types, collated by torch's own functions. Items of lists are checked too: a subclass of a tensor or
    mapping runs user code when it is collated.
    """
    modules = {getattr(function, "__module__", None) for function in default_collate_fn_map.values()}  # extensible
    is_torchs = any(collate is function for function in (default_collate, default_convert))
    return is_torchs and modules == {default_collate.__module__} and _is_plain(dataset)


def _is_plain(value: Any, levels: int = _DEEPEST) -> bool:
    if type(value) in _DATASETS:
        value = vars(value)  # a function there, which would shadow a method, is not plain
    kind = type(value)
    if kind not in _NESTED:
        return kind in _DATA
    # Container by container: one list of all values would be as large as the dataset.
    items = (*value, *value.values()) if kind is dict else value
    kinds = set(map(type, items))
    return kinds <= _DATA or (bool(levels) and kinds <= _ALLOWED and all(_is_plain(item, levels - 1) for item in items))


def outline(dataset: object) -> bytes:
    """Return a digest of the plain values in a dataset's attributes and parts.

    Values that `set_epoch` sets are ignored, because every copy gets the epoch; so are values deep in large data.
    """
    content, seen, parts = blake2b(digest_size=16), set[int](), [dataset]
    for value in parts:  # also over the parts that the loop adds
        if isinstance(value, VALUES):
            content.update(f"{value!r};".encode())
        elif len(parts) < MOST_PARTS and id(value) not in seen:
            seen.add(id(value))
            parts += _outlined(value)[: MOST_PARTS - len(parts)]
    return content.digest()


def _outlined(holder: Any) -> list[Any]:
    kind = type(holder)
    if kind in (list, tuple, dict):
        size = len(holder)
        items = [] if size > MOST_ITEMS else [*holder, *holder.values()] if kind is dict else holder
        return [size, *items]
    if not is_by_user(kind) and not str(kind.__module__).startswith("torch.utils.data"):
        return [kind.__qualname__]
    by_epoch = set_by_epoch(kind)
    return [part for name, value in attributes(holder) if name not in by_epoch for part in (name, value)]
