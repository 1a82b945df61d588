"""Which code is the user's, what an object refers to, and the random generators that a search finds in it."""

from __future__ import annotations

import dis
import functools
import logging
import random
import sys
import sysconfig
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ...plugins.first_party import is_first_party
from ..objects.equality import SCALARS
from .rng import KINDS, Generator, is_global


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


LONG: Final = 10_000  # items; a longer container is sampled first
SAMPLE: Final = 100
LEAVES: Final = (
    *SCALARS,
    set,
    frozenset,
    Tensor,
    np.generic,
    ModuleType,
    logging.Logger,
    logging.Handler,
    threading.Thread,
)
# These wrap the user's objects.
DATASETS: Final = ("heliograph.core.data.", "heliograph_recorder.demo.", "heliograph_testing.")
CONTAINERS: Final = (dict, list, tuple, deque)
CODE: Final = (
    *(MethodType, BuiltinMethodType, property, staticmethod, classmethod),
    *(functools.partial, functools.cached_property, functools._lru_cache_wrapper),
)
READS: Final = frozenset(
    ("initial_seed", "getstate", "get_state", "get_rng_state", "get_bit_generator", "setstate", "set_state", "fork_rng")
)
CODE_PARTS: Final = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset")


class SearchFindings(NamedTuple):
    """The result of a search.

    Attributes:
        generators: each once, without the global ones, in an order that pickling does not change.
        unseedable: objects that draw or count but cannot be seeded: `random.SystemRandom`, iterators.
        readers: functions that may read the state of a generator without changing it.
    """

    generators: list[Generator]
    unseedable: list[object]
    readers: list[FunctionType]


def search(*roots: object) -> SearchFindings:
    """Search objects for random generators at any depth, level by level, in the order of attributes and items.

    The search covers attributes, slots, containers, object arrays, closures, defaults, partials and bound methods; for
    the user's code, also class attributes and the globals that functions name. For a container of more
    than 10,000 items, the first 100 and one of each type are searched. Sets, whose order differs between
    processes, modules, tensors, loggers and threads are skipped, and so is state that a library has only in C.
    """
    walk = _Walk()
    level = walk.admit(roots)
    while level:
        level = [part for holder in level for part in walk.admit(walk.parts(holder))]
    return walk.findings


class _Walk:
    def __init__(self) -> None:
        self.findings = SearchFindings([], [], [])
        self.seen: dict[int, object] = {}  # by id; the references keep ids from being reused

    def admit(self, parts: Iterable[Any]) -> list[Any]:
        admitted: list[Any] = []
        for part in parts:
            kind: type = type(part)
            family = _family(kind)
            if family == "leaf" or id(part) in self.seen:
                continue
            self.seen[id(part)] = part
            if family == "generator":
                self.findings.generators.extend([] if is_global(part) else [part])
            elif family in ("unseedable", "iterator"):
                self.findings.unseedable.append(part)
            else:
                admitted.append(part)
        return admitted

    def parts(self, holder: Any) -> Iterable[Any]:
        kind = type(holder)
        if kind in CONTAINERS:
            return self.contents(holder, kind)
        if isinstance(holder, FunctionType):
            if READS & code_names(holder.__code__).keys():
                self.findings.readers.append(holder)
            return function_parts(holder)
        if isinstance(holder, type):
            return class_parts(holder)
        if isinstance(holder, CODE):
            return [getattr(holder, name, None) for name in CODE_PARTS]
        if isinstance(holder, np.ndarray):
            return self.searched(holder.ravel().tolist()) if holder.dtype.hasobject else ()
        try:
            parts: list[Any] = [value for _, value in attributes(holder)]
        except Exception:  # noqa: BLE001  # a proxy may raise anything
            return ()
        base = next((base for base in CONTAINERS if isinstance(holder, base)), None)
        parts += [] if base is None else self.contents(holder, base)
        parts += [holder.default_factory] if isinstance(holder, defaultdict) else []
        if id(kind) not in self.seen:
            self.seen[id(kind)] = kind
            parts += class_parts(kind)
        if is_by_user(kind):
            return parts
        kinds = map(type, parts)  # a library counts with iterators
        return [part for part, part_kind in zip(parts, kinds, strict=True) if _family(part_kind) != "iterator"]

    def contents(self, holder: Any, base: Any) -> list[Any]:
        # Runs no code of the class.
        if base is dict:
            return [*self.searched(dict.keys(holder)), *self.searched(dict.values(holder))]
        return self.searched(holder if type(holder) is base else list(base.__iter__(holder)))

    def searched(self, items: Collection[Any]) -> list[Any]:
        kinds = set(map(type, items))
        if all(_family(kind) == "leaf" for kind in kinds):
            return []
        if len(items) <= LONG:
            return [*items]
        return [*islice(items, SAMPLE), *dict(zip(map(type, items), items, strict=True)).values()]


@cache
def _family(kind: type) -> str:
    module = str(kind.__module__)
    if issubclass(kind, random.SystemRandom):
        return "unseedable"
    if issubclass(kind, KINDS):
        return "generator"
    if module in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return "iterator"
    if issubclass(kind, LEAVES) or (is_ours(module) and not module.startswith(DATASETS)):
        return "leaf"
    return "holder"
