"""Which modules are the user's; which datasets run no code of the user's."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from ....plugins.first_party import MODULES, is_first_party

# In a checkout, other folders are beside the rooms.
_KERNEL: Final = ("core/", "events/", "plugins/", "builtin_callbacks/", "__init__.py", "__main__.py", "spi.py")
_DATA: Final = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # none of their subclasses, which may do anything when they are read
_ALLOWED: Final = _DATA | _NESTED
_DEEPEST: Final = 16  # levels; what contains itself has no end
_MANY: Final = 1000  # items; what those of a longer container consist of is checked again only if its length changes
_DATASETS: Final = (TensorDataset, Subset, ConcatDataset, StackDataset)


def _first_party_folders() -> Iterator[str]:
    """Yield the folders of our sources: those of an editable install are not among the libraries."""
    for name in sorted(MODULES):
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from (f"{folder}/{part}" for part in _KERNEL) if name == "heliograph" else (f"{folder}/",)


@lru_cache(maxsize=8)
def _libraries(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the beginnings of the paths of installed code; pip may install into any folder of `sys.path`."""
    folders = [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for path in paths:
        with suppress(OSError):
            if path and any(file.suffix == ".dist-info" for file in Path(path).iterdir()):
                folders.append(f"{path.rstrip('/')}/")
    return ("<frozen", *folders, *_first_party_folders())


@cache
def is_users(name: str) -> bool:
    """Return whether a module is neither Python's, nor an installed library, nor this package."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        package = name.rpartition(".")[0]
        if package in sys.modules:  # a module in C++, such as torch._C._profiler
            return is_users(package)
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return name not in sys.builtin_module_names and origin not in ("built-in", "frozen")
    return not file.startswith(_libraries(tuple(sys.path)))


def is_ours(name: str) -> bool:
    """True if a module is of heliograph or one of its packages; their tests are a user's code."""
    return is_first_party(name) and not is_users(name)


def unwrapped(value: Any) -> Any:
    """Return what a function of a library wraps, as `torch.compile(function)` does; any other value unchanged."""
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        if is_users(str(value.__globals__.get("__name__"))):  # functools.wraps changes __module__
            break
        value = value.__wrapped__
    return value


def module_of(kind: type) -> str:
    """Return the name of the module of a class; some have none."""
    return str(kind.__module__)


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
            indices = dataset.indices
            is_data = type(indices) is range or (type(indices) in (list, tuple) and self._holds_data(indices))
            return is_data and self._is_plain(dataset.dataset)
        inner = dataset.datasets
        return type(inner) in _NESTED and all(map(self._is_plain, inner.values() if type(inner) is dict else inner))

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
