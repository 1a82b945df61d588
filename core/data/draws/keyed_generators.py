"""The random generators of data objects: found by a search, and seeded by position with the global ones."""

from __future__ import annotations

import functools
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from functools import partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from ...objects.equality import SCALARS
from ...system.extras import with_article
from .generators import KINDS, Generator, generator_states, is_global, key_generators, seed_all
from .rng import generator_state
from .users_code import attributes, class_parts, function_parts, is_ours, is_users, module_of

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
CODE_PARTS: Final = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset")


class SearchFindings(NamedTuple):
    """The result of a search.

    Attributes:
        generators: each once, without the global ones, in an order that pickling does not change.
        unseedable: objects that draw or count but cannot be seeded: `random.SystemRandom`, iterators.
    """

    generators: list[Generator]
    unseedable: list[object]


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
        self.findings = SearchFindings([], [])
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
        return [part for part, part_kind in zip(parts, kinds, strict=True) if _family(part_kind) != "iterator"]

    def contents(self, holder: Any, base: Any) -> list[Any]:
        # Runs no code of the class.
        if base is dict:
            return [*self.searched(dict.keys(holder)), *self.searched(dict.values(holder))]
        return self.searched(holder if type(holder) is base else list(base.__iter__(holder)))

    def searched(self, items: Collection[Any]) -> list[Any]:
        kinds = set(map(type, items))
        if kinds <= SCALARS or all(_family(kind) == "leaf" for kind in kinds):
            return []
        if len(items) <= LONG:
            return [*items]
        return [*islice(items, SAMPLE), *dict(zip(map(type, items), items, strict=True)).values()]


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
    return "holder"


BEGIN = -1  # in place of a position: for draws before the first batch


class KeyedGenerators:
    """The random generators of objects: searched in the process that uses them, in every epoch.

    Forked worker processes inherit the findings; persistent workers search again.

    Args:
        holders: objects that may contain generators.
        follower: gets the epoch through its `set_epoch` when the epoch changes, in every process.
    """

    def __init__(self, *holders: Any, follower: Any = None) -> None:
        self._holders, self._follower = holders, follower
        self._findings = search()
        self._epoch: int | None = None

    def seed(self, seed: int, epoch: int, *position: int) -> None:
        self.begin_epoch(seed, epoch)
        seed_all(seed, epoch, *position)
        if self._findings.generators:
            key_generators(self._findings.generators, seed, epoch, *position)

    def begin(self, seed: int, epoch: int) -> None:
        # Draws of `set_epoch` are keyed, so they are the same in every process.
        self._epoch = epoch
        self.look()
        if hasattr(self._follower, "set_epoch"):
            self.seed(seed, epoch, BEGIN)
            set_epoch(self._follower, epoch)
            self.look()

    def begin_epoch(self, seed: int, epoch: int) -> None:
        if epoch != self._epoch:
            self.begin(seed, epoch)

    def look(self) -> bool:
        # Searches again; returns whether a new generator was found.
        before = self._findings  # the objects stay alive until the ids are compared
        self._findings = search(*self._holders)
        return not set(map(id, self._findings.generators)) <= set(map(id, before.generators))

    def unkeyed(self, name: str) -> list[str]:
        """Return a sentence for each kind of object that cannot be seeded.

        Args:
            name: of the object that contains it.
        """
        kinds = dict.fromkeys(type(value).__qualname__ for value in self._findings.unseedable)
        return [
            f"{name} uses {with_article(kind)}, which cannot be seeded, so a resumed run continues with a different "
            f"state: {'use random.Random(seed)' if kind == 'SystemRandom' else 'use the index of the sample'}"
            for kind in kinds
        ]

    def states(self) -> list[Any]:
        return [generator_states(), *map(generator_state, self._findings.generators)]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has other generators
        return partial(KeyedGenerators, follower=self._follower), self._holders


def set_epoch(loader: Any, epoch: int) -> None:
    # For loaders and samplers that shuffle by the epoch.
    for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(setter := getattr(part, "set_epoch", None)):
            setter(epoch)
