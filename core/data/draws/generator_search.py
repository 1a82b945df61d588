"""The search for the random generators of data objects."""

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

from ...objects.equality import SCALARS
from .generators import KINDS, Generator, is_global
from .object_parts import attributes, class_parts, function_parts
from .users_code import is_ours, is_users, module_of

LONG: Final = 10_000  # of a longer container a sample is searched first
SAMPLE: Final = 100
LEAVES: Final = (*SCALARS, Tensor, np.generic, ModuleType, logging.Logger, logging.Handler, threading.Thread)
DATASETS: Final = ("heliograph.core.data.", "heliograph_recorder.demo.", "heliograph_testing.")  # may hold the user's
CONTAINERS: Final = (dict, list, tuple, deque, set, frozenset)
CODE: Final = (
    *(MethodType, BuiltinMethodType, property, staticmethod, classmethod),
    *(functools.partial, functools.cached_property, functools._lru_cache_wrapper),
)
CODE_PARTS: Final = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset")


class Findings(NamedTuple):
    """What a search has found.

    Attributes:
        generators: without the global ones, each once, in an order that pickling does not change.
        unseedable: objects that draw or count, but cannot be seeded: `random.SystemRandom`, iterators.
        in_sets: for each set of several generators, their number: their order differs between processes.
    """

    generators: list[Generator]
    unseedable: list[object]
    in_sets: list[int]


def search(*roots: object) -> Findings:
    """Search objects for random generators, at any depth: level by level, in the order of attributes and items.

    Searched are attributes, slots, containers, object arrays, closures, defaults, partials and bound methods; and of
    the user's code, not of libraries, class attributes and the globals that functions name. Sets come last. Of a
    container of more than 10,000 items, the first 100 and one of each type are searched, and the rest only if these
    lead to a generator. Modules, tensors, loggers and threads are left alone, and what a library keeps only in C.
    """
    walk = _Walk({})
    walk.through(roots)
    return walk.findings


class _Walk:
    def __init__(self, seen: dict[int, object]) -> None:
        self.findings = Findings([], [], [])
        self.seen = seen  # by id; it keeps the objects alive, so that no id is used twice

    def through(self, parts: Iterable[object]) -> None:
        sets: list[Any] = []
        level = self.admit(parts, sets)
        while level:
            level = [part for holder in level for part in self.admit(self.parts(holder), sets)]
        for holder in sets:
            count = len(self.findings.generators)
            self.through(self.contents(holder, set if isinstance(holder, set) else frozenset))
            if (size := len(self.findings.generators) - count) > 1:
                self.findings.in_sets.append(size)

    def admit(self, parts: Iterable[Any], sets: list[Any]) -> list[Any]:
        """Return the parts that are to be searched, each once; note what is found, and leave the sets for later."""
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
                (sets if family == "set" else admitted).append(part)
        return admitted

    def parts(self, holder: Any) -> Iterable[Any]:
        kind = type(holder)
        if kind in CONTAINERS:
            return self.contents(holder, kind)
        if isinstance(holder, FunctionType):
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
        if is_users(module_of(kind)):
            return parts
        kinds = map(type, parts)  # a library counts with iterators
        return [part for part, of_part in zip(parts, kinds, strict=True) if _family(of_part) != "iterator"]

    def contents(self, holder: Any, base: Any) -> list[Any]:
        """Return what is to be searched in a container; no code of its class runs."""
        if base is dict:
            return [*self.searched(dict.keys(holder)), *self.searched(dict.values(holder))]
        return self.searched(holder if type(holder) is base else list(base.__iter__(holder)))

    def searched(self, items: Collection[Any]) -> list[Any]:
        kinds = set(map(type, items))
        if kinds <= SCALARS or all(_family(kind) == "leaf" for kind in kinds):
            return []
        if len(items) <= LONG:
            return [*items]
        sample, count = _Walk(self.seen), len(self.seen)
        of_kinds = dict(zip(map(type, items), items, strict=True)) if len(kinds) > 1 else {}
        sample.through([*islice(items, SAMPLE), *of_kinds.values()])
        if not any(sample.findings):
            return []
        while len(self.seen) > count:  # they are found again, at their places
            self.seen.popitem()
        return [*items]


@functools.cache
def _family(kind: type) -> str:
    module = module_of(kind)
    if issubclass(kind, random.SystemRandom):
        return "unseedable"
    if issubclass(kind, KINDS):
        return "generator"
    if module in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return "iterator"
    if issubclass(kind, LEAVES) or (is_ours(module) and not module.startswith(DATASETS)):
        return "leaf"
    return "set" if issubclass(kind, set | frozenset) else "holder"
