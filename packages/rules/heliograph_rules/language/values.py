"""The values that rules read: converted to plain values when they are used, at a cost."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import is_
from typing import Any, Final, cast

from heliograph.spi import known_names, with_article

from ..errors import MetricUnavailable, RuleLimitError, RuleTypeError, show
from .kinds import NONE
from .limits import MAX_DEPTH, MAX_KEY_BITS, NODE, TUPLE, Budget, check_bits

CONTAINERS: tuple[type, ...] = (dict, list, tuple, deque, set, frozenset)
# Methods of the base, because a subclass may run any code in its own.
DERIVED: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__pos__),
    (float, float.__pos__),
    (str, str.__str__),
)
INCORRECT: Final = "Rule failed due to incorrect type usage"
MISSING: Final = object()
NAME_OF: Final = type.__dict__["__name__"].__get__  # a metaclass may run any code in its own


class Unavailable:
    """The value of a metric that has none yet; it can only be compared with None."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        raise MetricUnavailable([self.name])


class Container:
    """A container of a metric's value; its content is not converted yet."""

    __slots__ = ("base", "raw")

    def __init__(self, raw: Any, base: Any) -> None:
        self.raw, self.base = raw, base

    def __len__(self) -> int:
        return int(self.base.__len__(self.raw))


def admit(value: object) -> Any:
    kind = type(value)
    if is_scalar(kind):
        return value
    for base in CONTAINERS:
        if issubclass(kind, base):
            return Container(value, base)
    for base, as_base in DERIVED:
        if issubclass(kind, base):
            return as_base(value)
    item = _item(value)
    if not is_scalar(type(item)):
        raise RuleTypeError(
            f"{INCORRECT}: a metric's value contains {with_article(NAME_OF(kind))}. Rules read numbers, booleans, "
            "text, None, lists, tuples, dicts, sets and deques of these, and tensors and arrays of one element."
        )
    return item


def is_scalar(kind: type) -> bool:
    return kind is float or kind is int or kind is str or kind is bool or kind is NONE


def describe(value: Any) -> str:
    kind = value.base if type(value) is Container else type(value)
    return show(value) if is_scalar(kind) else with_article(kind.__name__)


def _item(value: object) -> object:
    # The element of a NumPy or torch value of one element, or MISSING.
    kind: Any = type(value)
    modules = cast("dict[str, Any]", sys.modules)
    numpy, torch = modules.get("numpy"), modules.get("torch")  # do not import them for this
    if numpy is not None and issubclass(kind, numpy.generic):
        return numpy.generic.item(value)
    if numpy is not None and kind is numpy.ndarray and numpy.size(value) == 1:
        return numpy.ndarray.item(value)
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter) and torch.numel(value) == 1:
        return torch.Tensor.item(value)
    return MISSING


SHOWN_KEYS = 20


class ValueReader:
    """Reads values and charges the work to a budget."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def plain(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is Unavailable:
            raise MetricUnavailable([value.name])
        if is_scalar(kind):
            return self._scalar(value)
        if kind is not Container:
            value = admit(value)
            if type(value) is not Container:
                return self._scalar(value)
        if depth >= MAX_DEPTH:
            raise RuleLimitError(f"A value is nested too deeply: it has more than {MAX_DEPTH} levels.")
        return self._container(value, depth + 1)

    def key(self, value: Any) -> Any:
        self.budget.charge(NODE)
        value = self._hash(self.plain(value))
        for part in value if type(value) is tuple else (value,):
            if type(part) is tuple:
                self.key(part)
            elif not is_scalar(type(part)):
                raise RuleTypeError(
                    f"{INCORRECT}: {with_article(type(part).__name__)} cannot be a key or an element of a set."
                )
            elif type(part) is int and part.bit_length() > MAX_KEY_BITS:
                raise RuleLimitError(f"An integer is too large for a key or a set: above 2**{MAX_KEY_BITS}.")
        return value

    def items(self, value: Any) -> Iterator[Any]:
        container = self._open(value)
        if container.base in (set, frozenset):  # the same order in every process
            self.budget.charge(20 * len(container))
            return iter(sorted(self.plain(container), key=repr))
        return map(self._admit, container.base.__iter__(container.raw))

    def size(self, value: Any) -> int:
        return len(value) if type(value) is str else len(self._open(value))

    def at(self, value: Any, key: Any) -> Any:
        if type(value) is str:
            self.budget.charge(len(value) // 32)
            return value[self._index(key)]
        container = self._open(value)
        if type(key) is slice and container.base is dict:
            raise RuleTypeError(f"{INCORRECT}: a dict has no slices.")
        if container.base is dict:
            return self._entry(container, self.key(key))
        if container.base in (set, frozenset):
            raise RuleTypeError(f"{INCORRECT}: a set has no indices.")
        index = self._index(key)
        if type(index) is int:
            return self._admit(container.base.__getitem__(container.raw, index))
        self.budget.charge(len(container) // 16)
        base = list if container.base is deque else container.base
        return Container(base(container.base.__iter__(container.raw))[index], base)

    def keys(self, container: Container) -> list[Any]:
        return [self._hash(key) for key in self.plain(list(dict.keys(container.raw)))]

    def _admit(self, value: Any) -> Any:
        kind = type(value)  # compared by `is`: a metaclass may run any code in `==`
        return value if kind is Container or kind is Unavailable else admit(value)

    def _open(self, value: Any) -> Container:
        if type(value) is Unavailable:
            raise MetricUnavailable([value.name])
        if type(value) is str:
            self.budget.charge(len(value))
            value = list(value)
        container = value if type(value) is Container else admit(value)
        if type(container) is not Container:
            kind = type(container).__name__
            raise RuleTypeError(f"{INCORRECT}: {with_article(kind)} has no items, got {describe(container)}.")
        return container

    def _index(self, key: Any) -> int | slice:
        parts = (key.start, key.stop, key.step) if type(key) is slice else (key,)
        plain = [self.plain(part) for part in parts]
        if any(type(part) not in (int, bool, NONE) for part in plain) or plain == [None]:
            raise RuleTypeError(f"{INCORRECT}: an index must be an integer, got {self.plain(key)!r:.80}.")
        return slice(*plain) if type(key) is slice else int(plain[0])

    def _entry(self, container: Container, key: Any) -> Any:
        keys: Iterable[Any] = dict.keys(container.raw)
        values = container.raw
        self.budget.charge(len(container))
        if not _are_all(keys, str):  # another kind of key may run any code when it is compared
            keys = self.keys(container)
            values = dict(zip(keys, dict.values(container.raw), strict=True))
        value = dict.get(values, key, MISSING)  # a subclass may run any code for a missing key
        if value is MISSING:
            raise KeyError(f"there is no key {key!r:.80}.{_suggest_key(key, keys)}")
        return self._admit(value)

    def _scalar(self, value: Any) -> Any:
        if type(value) is int:
            check_bits(value.bit_length())
            self.budget.charge(1 + value.bit_length() // 64)
        else:
            self.budget.charge(1 + len(value) // 32 if type(value) is str else 1)
        return value

    def _container(self, container: Container, depth: int) -> Any:
        raw, base, size = container.raw, container.base, len(container)
        self.budget.charge(25 + (5 * size if base in (set, frozenset) else size // 4))
        if base is dict:
            self.budget.charge(10 * size)
            return {self._hash(self.plain(key, depth)): self.plain(value, depth) for key, value in dict.items(raw)}
        into: Callable[[Iterable[Any]], Any] = {deque: list, frozenset: set}.get(base, base)
        if self._is_one_kind(container):
            return into(base.__iter__(raw))
        self.budget.charge(5 * size)
        parts = (self.plain(item, depth) for item in base.__iter__(raw))
        return into(map(self._hash, parts) if into is set else parts)

    def _hash(self, value: Any) -> Any:
        # Charges for the comparison of a tuple with every colliding key.
        if type(value) is tuple:
            self.budget.charge(TUPLE + len(value) * TUPLE // 10)
            for part in value:
                self._hash(part)
        return value

    def _is_one_kind(self, container: Container) -> bool:
        # Whether a container, such as a long window, has only floats, only texts or only integers.
        raw, every = container.raw, container.base.__iter__
        if _are_all(every(raw), float):
            return True
        if _are_all(every(raw), str):
            self.budget.charge(sum(map(len, every(raw))) // 32)
            return True
        if _are_all(every(raw), int):
            check_bits(max(map(int.bit_length, every(raw))))
            self.budget.charge(sum(map(int.bit_length, every(raw))) // 64)
            return True
        return False


def _are_all(values: Iterable[object], kind: type) -> bool:
    # Exact types: runs no code of the values or of their types.
    return all(map(is_, map(type, values), repeat(kind)))


def _suggest_key(key: object, keys: Iterable[Any]) -> str:
    names = [name for name in keys if type(name) is str and len(name) < 80]
    return known_names(key, names) if type(key) is str and len(key) < 80 and len(names) <= SHOWN_KEYS else ""
