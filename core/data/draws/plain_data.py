"""Which datasets are nothing but data: no code runs that could draw when they are read and collated."""

from __future__ import annotations

from types import NoneType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map

_DATA: Final = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # none of their subclasses, which may do anything when they are read
_ALLOWED: Final = _DATA | _NESTED
_DEEPEST: Final = 16  # levels; what contains itself has no end
_MANY: Final = (
    1000  # in a longer container, what its items consist of is looked at again only when its length is another one
)
_DATASETS: Final = (TensorDataset, Subset, ConcatDataset, StackDataset)


class Plainness:
    """Whether a dataset is nothing but data, so that no code runs that could draw when it is read and collated.

    That is: torch's own datasets, lists and tuples, of tensors, arrays, numbers and strings, nested in any way, of
    exactly these types, collated by torch's own functions. What a list holds is looked at, too: a tensor or a mapping
    of a class of the user's runs that one's code when it is collated.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}  # by id
        self._former = self._known

    def of(self, dataset: Any, collate: Any) -> bool:
        """Return whether a dataset and what collates it are plain now.

        Args:
            dataset: map-style.
            collate: makes a batch of its samples.
        """
        self._former, self._known = self._known, {}
        own = {getattr(each, "__module__", None) for each in default_collate_fn_map.values()}  # anyone may add to it
        is_torchs = any(collate is each for each in (default_collate, default_convert))
        return is_torchs and own == {default_collate.__module__} and self._is_plain(dataset)

    def _is_plain(self, dataset: Any) -> bool:
        kind = type(dataset)
        if kind in (list, tuple):
            return self._holds_data(dataset)
        if kind not in _DATASETS or any(map(callable, vars(dataset).values())):  # that would go before a method
            return False
        if kind is TensorDataset:
            return _is_data([dataset.tensors])
        if kind is Subset:
            return self._are_indices(dataset.indices) and self._is_plain(dataset.dataset)
        inner = dataset.datasets
        return type(inner) in _NESTED and all(map(self._is_plain, inner.values() if type(inner) is dict else inner))

    def _are_indices(self, indices: Any) -> bool:
        return type(indices) is range or (type(indices) in (list, tuple) and self._holds_data(indices))

    def _holds_data(self, items: Any) -> bool:
        holder, length = self._former.get(id(items), (None, 0))
        is_known = holder is items and length == len(items)
        found = set(map(type, items)) <= _ALLOWED if is_known else _is_data(items)
        if found and len(items) > _MANY:
            self._known[id(items)] = items, len(items)
        return found


def _is_data(items: Any, levels: int = _DEEPEST) -> bool:
    """Look container by container: one list of all that a dataset holds would be as large as the dataset."""
    if type(items) is dict:
        return _is_data(tuple(items), levels) and _is_data(tuple(items.values()), levels)
    kinds = set(map(type, items))
    if kinds <= _DATA or not kinds <= _ALLOWED:
        return kinds <= _DATA
    return levels > 1 and all(_is_data(each, levels - 1) for each in items if type(each) in _NESTED)
