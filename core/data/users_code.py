"""The code and parts of objects: which code is the user's, what an object refers to, datasets without any code."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType, NoneType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

from ...plugins.providers import is_first_party
from ..objects.equality import VALUES
from .generators import KINDS

_DATA: Final = frozenset(
    {NoneType, range, bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray}
    | set(np.sctypeDict.values())
)
_NESTED: Final = frozenset({list, tuple, dict})  # no subclasses, which may run any code when they are read
_DATASETS: Final = frozenset({TensorDataset, Subset, ConcatDataset, StackDataset})
_ALLOWED: Final = _DATA | _NESTED | _DATASETS
_DEEPEST: Final = 16  # levels; a container may contain itself


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
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        package = name.rpartition(".")[0]
        if package in sys.modules:  # a C++ module, such as torch._C._profiler
            return is_users(package)
        return name not in sys.stdlib_module_names
    return not file.startswith(_libraries(tuple(sys.path)))


def is_ours(name: str) -> bool:
    # True for heliograph and its packages; their tests count as user code.
    if name == "__main__":  # of `python -m heliograph`, too
        name = getattr(getattr(sys.modules[name], "__spec__", None), "name", name)
    return is_first_party(name) and "tests" not in name.split(".")


def is_by_user(value: Any) -> bool:
    # True for a class or function of the user.
    return is_users(str(value.__module__ or ""))


def unwrapped(value: Any) -> Any:
    # The function inside the wrapper of a library, such as `torch.compile`.
    while isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        if is_users(str(value.__globals__.get("__name__"))):  # functools.wraps changes __module__
            break
        value = value.__wrapped__
    return value


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


MAKING: Final = ("__init__", "__new__", "__post_init__", "__setstate__", "__del__")  # these do not run during loading
MOST_ITEMS: Final = 1000  # of a longer container only the length enters the digest
MOST_PARTS: Final = 50_000  # in the digest, the outermost first: some tens of milliseconds


@cache
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    slots: dict[str, MemberDescriptorType] = {}
    for base in kind.__mro__:
        for name, value in sorted(vars(base).items()) if "__slots__" in vars(base) else ():
            if isinstance(value, MemberDescriptorType):
                slots.setdefault(name, value)
    return slots


def attributes(value: object) -> Iterator[tuple[str, object]]:
    # From `__dict__` and slots; no code of the class runs.
    kind: type = type(value)
    instance_dict = value.__dict__ if kind.__dictoffset__ else {}
    for name, item in list(instance_dict.items()):
        if not (name[:2] == "__" and name[-2:] == "__"):
            yield name, item
    for name, slot in slots_of(kind).items():
        with suppress(AttributeError):  # not set yet
            yield name, slot.__get__(value)


def cell_content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def class_parts(kind: type) -> Iterator[object]:
    # The generators of any class; for the user's classes, also functions and variables.
    for base in kind.__mro__:
        is_own = is_by_user(base)
        for name, value in list(vars(base).items()):
            is_part = name[:2] != "__" or (isinstance(value, FunctionType) and name not in MAKING)
            if isinstance(value, KINDS) or (is_own and is_part):
                yield value


def function_parts(function: FunctionType) -> Iterator[object]:
    """Yield closure cells, defaults and attributes of a function; for user code, also the globals that it names.

    Names of attributes count too: a global of the same name is a part.
    """
    yield from map(cell_content, function.__closure__ or ())
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values())
    if is_users(str(function.__globals__.get("__name__"))):
        names, spaces = code_names(function.__code__), [function.__globals__]
        for space in spaces:  # including the user's modules that it names or imports
            for name in names:
                value = space.get(name, sys.modules.get(name))
                if not isinstance(value, ModuleType):
                    yield value
                elif is_users(value.__name__) and not any(vars(value) is seen for seen in spaces):
                    spaces.append(vars(value))


def code_names(code: CodeType) -> dict[str, None]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= code_names(constant)
    return names


def set_by_epoch(kind: type) -> frozenset[str]:
    code = getattr(getattr(kind, "set_epoch", None), "__code__", None)
    steps = () if code is None else dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


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
