"""Detection of user code: modules outside of Python and installed libraries, and datasets without any."""

from __future__ import annotations

import sys
import sysconfig
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from ....plugins.first_party import is_first_party

_DATA: Final = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # no subclasses, which may run any code when they are read
_ALLOWED: Final = _DATA | _NESTED
_DEEPEST: Final = 16  # levels; a container may contain itself
_DATASETS: Final = (TensorDataset, Subset, ConcatDataset, StackDataset)


@lru_cache(maxsize=8)
def _libraries(paths: tuple[str, ...]) -> tuple[str, ...]:
    # Path prefixes of installed code; pip may install into any folder of `sys.path`.
    folders = [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for path in paths:
        with suppress(OSError):
            if path and any(file.suffix == ".dist-info" for file in Path(path).iterdir()):
                folders.append(f"{path.rstrip('/')}/")
    return ("<frozen", *folders)


@cache
def is_users(name: str) -> bool:
    # True unless the module is of Python, an installed library or this package.
    if is_ours(name):
        return False
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
    return is_first_party(name) and "tests" not in name.split(".")


def unwrapped(value: Any) -> Any:
    # The function inside the wrapper of a library, such as `torch.compile`.
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        if is_users(str(value.__globals__.get("__name__"))):  # functools.wraps changes __module__
            break
        value = value.__wrapped__
    return value


def module_of(kind: type) -> str:
    return str(kind.__module__)


def is_plain_data(dataset: Any, collate: Any) -> bool:
    """True if a dataset is pure data, so that reading and collating it runs no code that could draw.

    Pure data are torch's own datasets, lists and tuples of tensors, arrays, numbers and strings, nested in any way, of
    exactly these types, collated by torch's own functions. Items of lists are checked too: a subclass of a tensor or
    mapping runs user code when it is collated.
    """
    modules = {getattr(function, "__module__", None) for function in default_collate_fn_map.values()}  # extensible
    is_torchs = any(collate is function for function in (default_collate, default_convert))
    return is_torchs and modules == {default_collate.__module__} and _is_plain(dataset)


def _is_plain(dataset: Any) -> bool:
    kind = type(dataset)
    if kind in (list, tuple):
        return _is_data(dataset)
    if kind not in _DATASETS or any(map(callable, vars(dataset).values())):  # it would shadow a method
        return False
    if kind is TensorDataset:
        return _is_data([dataset.tensors])
    if kind is Subset:
        return (
            type(dataset.indices) in (range, list, tuple) and _is_data(dataset.indices) and _is_plain(dataset.dataset)
        )
    inner = dataset.datasets
    return type(inner) in _NESTED and all(map(_is_plain, inner.values() if type(inner) is dict else inner))


def _is_data(items: Any, levels: int = _DEEPEST) -> bool:
    # Container by container: one list of all values would be as large as the dataset.
    if type(items) is dict:
        return _is_data(tuple(items), levels) and _is_data(tuple(items.values()), levels)
    kinds = set(map(type, items))
    if kinds <= _DATA or not kinds <= _ALLOWED:
        return kinds <= _DATA
    return levels > 1 and all(_is_data(item, levels - 1) for item in items if type(item) in _NESTED)
