"""Detection of user code: modules outside of Python and installed libraries, and datasets without any."""

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

# A checkout has other folders too.
_KERNEL: Final = ("core/", "events/", "plugins/", "builtin_callbacks/", "__init__.py", "__main__.py", "spi.py")
_DATA: Final = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # no subclasses, which may run any code when they are read
_ALLOWED: Final = _DATA | _NESTED
_DEEPEST: Final = 16  # levels; a container may contain itself
_MANY: Final = 1000  # items; a longer container is checked again only if its length changes
_DATASETS: Final = (TensorDataset, Subset, ConcatDataset, StackDataset)


def _first_party_folders() -> Iterator[str]:
    # An editable install is outside of the library folders.
    for name in sorted(MODULES):
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from (f"{folder}/{part}" for part in _KERNEL) if name == "heliograph" else (f"{folder}/",)


@lru_cache(maxsize=8)
def _libraries(paths: tuple[str, ...]) -> tuple[str, ...]:
    # Path prefixes of installed code; pip may install into any folder of `sys.path`.
    folders = [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for path in paths:
        with suppress(OSError):
            if path and any(file.suffix == ".dist-info" for file in Path(path).iterdir()):
                folders.append(f"{path.rstrip('/')}/")
    return ("<frozen", *folders, *_first_party_folders())


@cache
def is_users(name: str) -> bool:
    # True unless the module is of Python, an installed library or this package.
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        package = name.rpartition(".")[0]
        if package in sys.modules:  # a C++ module, such as torch._C._profiler
            return is_users(package)
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return name not in sys.builtin_module_names and origin not in ("built-in", "frozen")
    return not file.startswith(_libraries(tuple(sys.path)))


def is_ours(name: str) -> bool:
    # True for heliograph and its packages; their tests count as user code.
    return is_first_party(name) and not is_users(name)


def unwrapped(value: Any) -> Any:
    # The function inside the wrapper of a library, such as `torch.compile`.
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        if is_users(str(value.__globals__.get("__name__"))):  # functools.wraps changes __module__
            break
        value = value.__wrapped__
    return value


def module_of(kind: type) -> str:
    return str(kind.__module__)


class Plainness:
    """Checks that a dataset is pure data, so that reading and collating it runs no code that could draw.

    Pure data are torch's own datasets, lists and tuples of tensors, arrays, numbers and strings, nested in any way, of
    exactly these types, collated by torch's own functions. Items of lists are checked too: a subclass of a tensor or
    mapping runs user code when it is collated.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}  # by id
        self._previous = self._known

    def of(self, dataset: Any, collate: Any) -> bool:
        self._previous, self._known = self._known, {}
        modules = {getattr(function, "__module__", None) for function in default_collate_fn_map.values()}  # extensible
        is_torchs = any(collate is function for function in (default_collate, default_convert))
        return is_torchs and modules == {default_collate.__module__} and self._is_plain(dataset)

    def _is_plain(self, dataset: Any) -> bool:
        kind = type(dataset)
        if kind in (list, tuple):
            return self._holds_data(dataset)
        if kind not in _DATASETS or any(map(callable, vars(dataset).values())):  # it would shadow a method
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
        holder, length = self._previous.get(id(items), (None, 0))
        is_known = holder is items and length == len(items)
        holds_data = set(map(type, items)) <= _ALLOWED if is_known else _is_data(items)
        if holds_data and len(items) > _MANY:
            self._known[id(items)] = items, len(items)
        return holds_data


def _is_data(items: Any, levels: int = _DEEPEST) -> bool:
    # Container by container: one list of all values would be as large as the dataset.
    if type(items) is dict:
        return _is_data(tuple(items), levels) and _is_data(tuple(items.values()), levels)
    kinds = set(map(type, items))
    if kinds <= _DATA or not kinds <= _ALLOWED:
        return kinds <= _DATA
    return levels > 1 and all(_is_data(item, levels - 1) for item in items if type(item) in _NESTED)
