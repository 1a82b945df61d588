"""What the user's own classes and functions refer to; that of libraries is left alone."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from ....plugins.first_party import MODULES
from .generators import KINDS

_ROOMS: Final = ("core", "events", "plugins", "builtin_callbacks")  # in a checkout, other folders are beside them
_PATHS: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def _first_party_folders() -> Iterator[str]:
    """Yield the folders of our sources: those of an editable install are not among the libraries."""
    for name in sorted(MODULES):
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from (f"{folder}/{room}/" for room in _ROOMS) if name == "heliograph" else (f"{folder}/",)


_LIBRARIES: Final = (
    "<frozen",
    *(f"{sysconfig.get_path(name)}/" for name in _PATHS),
    *_first_party_folders(),
)
_MAKING: Final = ("__init__", "__new__", "__post_init__", "__setstate__", "__del__")
_READ: Final = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


@cache
def is_users(name: str) -> bool:
    """Return whether a module is neither Python's, nor an installed library, nor this package."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return name not in sys.builtin_module_names and origin not in ("built-in", "frozen")
    return not file.startswith(_LIBRARIES)


def module_of(kind: type) -> str:
    """Return the name of the module of a class; some have none."""
    return str(kind.__module__)


def attributes_of(holder: Any) -> Mapping[str, Any]:
    """Return what an object has in its `__dict__`; nothing where it has none, or one that cannot be read."""
    try:
        found = getattr(holder, "__dict__", None)
    except Exception:  # noqa: BLE001  # a proxy may raise anything
        return {}
    return found if isinstance(found, Mapping) else {}


def class_parts(kind: type, *, whole: bool) -> Iterator[Any]:
    """Yield what is on a class: of the user's all but what Python puts there, of others the generators.

    Args:
        kind: the class.
        whole: whether its objects may still be made, so that what makes them counts.
    """
    for base in kind.__mro__:
        own = is_users(module_of(base))
        for name, value in list(vars(base).items()):
            if isinstance(value, KINDS) or (own and (whole or name not in _MAKING) and not _is_pythons(name, value)):
                yield value


def function_parts(function: FunctionType) -> Iterator[Any]:
    """Yield what a function closes over, its defaults and attributes, and the globals that the user's own names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from list(function.__dict__.values())
    if not function.__code__.co_filename.startswith(_LIBRARIES):
        yield from _globals(function)


def _globals(function: FunctionType) -> Iterator[Any]:
    names, within, imported = _names(function.__code__)
    space = function.__globals__
    modules = [sys.modules.get(name) for name in imported]
    for name in names:
        if isinstance(value := space.get(name), ModuleType):
            modules.append(value)
        else:
            yield value
    done: set[int] = set()
    while modules:
        module = modules.pop(0)
        if module is None or id(module) in done or not is_users(module.__name__):
            continue
        done.add(id(module))
        for value in (vars(module)[name] for name in within if name in vars(module)):
            if isinstance(value, ModuleType):
                modules.append(value)
            else:
                yield value


def global_names(function: FunctionType) -> tuple[str, ...]:
    """Return the names of the globals that a function reads or sets."""
    return _names(function.__code__)[0]


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the names that code reads of its globals, of what these hold, and of what it imports."""
    found: dict[str, list[str]] = {"globals": [], "within": [], "imported": []}
    pending = [code]
    while pending:
        each = pending.pop(0)
        pending += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
        for step in dis.get_instructions(each):
            if step.opname in _READ:
                found["globals"].append(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                found["within"].append(step.argval)
            elif step.opname == "IMPORT_NAME":
                found["imported"].append(step.argval)
    unique = [tuple(dict.fromkeys(names)) for names in found.values()]
    return unique[0], unique[1], unique[2]


def _is_pythons(name: str, value: Any) -> bool:
    return name == "_abc_impl" or (
        name.startswith("__") and name.endswith("__") and not isinstance(value, FunctionType)
    )
