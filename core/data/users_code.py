"""The code and parts of objects: which code is the user's, and what an object refers to."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final

from ...plugins.first_party import is_first_party
from .rng import KINDS


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


MAKING: Final = ("__init__", "__new__", "__post_init__", "__setstate__", "__del__")  # these do not run during loading


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
