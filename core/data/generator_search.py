"""The search for random generators in objects."""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ..objects.equality import SCALARS
from .rng import KINDS, Generator, is_global
from .users_code import attributes, class_parts, code_names, function_parts, is_by_user, is_ours

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


@functools.cache
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
