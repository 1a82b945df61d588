"""How rules look into values: each is turned into a plain one only where it is needed, and that costs work."""

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
# The base's own method, as a subclass may do anything in its own.
DERIVED: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__pos__),
    (float, float.__pos__),
    (str, str.__str__),
)
INCORRECT: Final = "Rule failed due to incorrect type usage"
MISSING: Final = object()
NAME_OF: Final = type.__dict__["__name__"].__get__  # a metaclass may do anything in its own


class Unavailable:
    """The value of a metric that has no value yet; only whether it is None can be asked."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        raise MetricUnavailable([self.name])


class Held:
    """A container as it was handed in, with nothing inside it looked at yet."""

    __slots__ = ("base", "raw")

    def __init__(self, raw: Any, base: Any) -> None:
        self.raw, self.base = raw, base

    def __len__(self) -> int:
        return int(self.base.__len__(self.raw))


def admit(value: object) -> Any:
    """Return a value as rules may use it: a plain one, or a container still `Held`.

    Raises:
        RuleTypeError: it is neither plain data nor one number or boolean of NumPy or torch.
    """
    kind = type(value)
    if is_scalar(kind):
        return value
    for base in CONTAINERS:
        if issubclass(kind, base):
            return Held(value, base)
    for base, as_base in DERIVED:
        if issubclass(kind, base):
            return as_base(value)
    item = _item(value)
    if not is_scalar(type(item)):
        raise RuleTypeError(
            f"{INCORRECT}: a metric's value holds {with_article(NAME_OF(kind))}. Rules read numbers, booleans, texts, "
            "None, lists, tuples, dicts, sets and deques of such, and tensors and arrays of one element."
        )
    return item


def is_scalar(kind: type) -> bool:
    """Whether values of exactly this type are plain and hold nothing."""
    return kind is float or kind is int or kind is str or kind is bool or kind is NONE


def describe(value: Any) -> str:
    """Return a plain value as Python writes it; the type of a container, which may hold anything."""
    kind = value.base if type(value) is Held else type(value)
    return show(value) if is_scalar(kind) else with_article(kind.__name__)


def _item(value: object) -> object:
    """Return the one element of a NumPy or torch value; of anything else, no plain value."""
    kind: Any = type(value)
    modules = cast("dict[str, Any]", sys.modules)
    numpy, torch = modules.get("numpy"), modules.get("torch")  # neither is imported for this
    if numpy is not None and issubclass(kind, numpy.generic):
        return numpy.generic.item(value)
    if numpy is not None and kind is numpy.ndarray and numpy.size(value) == 1:
        return numpy.ndarray.item(value)
    if torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter) and torch.numel(value) == 1:
        return torch.Tensor.item(value)
    return MISSING


SHOWN_KEYS = 20


class Reader:
    """Looks into values, and charges a budget for it.

    Args:
        budget: of the evaluation.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def plain(self, value: Any, depth: int = 0) -> Any:
        """Return a value with all that it holds as exact plain types.

        Raises:
            MetricUnavailable: it is, or holds, a metric that has no value yet.
            RuleLimitError: it is too large.
            RuleTypeError: it holds what rules cannot read.
        """
        kind = type(value)
        if kind is Unavailable:
            raise MetricUnavailable([value.name])
        if is_scalar(kind):
            return self._scalar(value)
        if kind is not Held:
            value = admit(value)
            if type(value) is not Held:
                return self._scalar(value)
        if depth >= MAX_DEPTH:
            raise RuleLimitError(f"A value is too deep: it holds more than {MAX_DEPTH} levels.")
        return self._container(value, depth + 1)

    def key(self, value: Any) -> Any:
        """Return the plain value of a key, or of an element of a set.

        Raises:
            RuleLimitError: it holds a number that is too large for this.
            RuleTypeError: it is not a number, text, boolean, None or tuple of such.
        """
        self.budget.charge(NODE)
        value = self._hash(self.plain(value))
        for each in value if type(value) is tuple else (value,):
            if type(each) is tuple:
                self.key(each)
            elif not is_scalar(type(each)):
                raise RuleTypeError(
                    f"{INCORRECT}: {with_article(type(each).__name__)} cannot be a key, or be in a set."
                )
            elif type(each) is int and each.bit_length() > MAX_KEY_BITS:
                raise RuleLimitError(f"A whole number is too large for a key, or for a set: above 2**{MAX_KEY_BITS}.")
        return value

    def items(self, value: Any) -> Iterator[Any]:
        """Return what a container holds, or a dict's keys, one by one, each still as it was handed in."""
        held = self._opened(value)
        if held.base in (set, frozenset):  # the same order in every process, whatever its hashes are
            self.budget.charge(20 * len(held))
            return iter(sorted(self.plain(held), key=repr))
        return map(self._admitted, held.base.__iter__(held.raw))

    def size(self, value: Any) -> int:
        """Return the length of a text or of a container."""
        return len(value) if type(value) is str else len(self._opened(value))

    def at(self, value: Any, key: Any) -> Any:
        """Return `value[key]`; a slice where the key is one.

        Raises:
            LookupError: there is no such key or index.
        """
        if type(value) is str:
            self.budget.charge(len(value) // 32)
            return value[self._index(key)]
        held = self._opened(value)
        if type(key) is slice and held.base is dict:
            raise RuleTypeError(f"{INCORRECT}: a dict has no slices.")
        if held.base is dict:
            return self._entry(held, self.key(key))
        if held.base in (set, frozenset):
            raise RuleTypeError(f"{INCORRECT}: a set has no indices.")
        index = self._index(key)
        if type(index) is int:
            return self._admitted(held.base.__getitem__(held.raw, index))
        self.budget.charge(len(held) // 16)
        base = list if held.base is deque else held.base
        return Held(base(held.base.__iter__(held.raw))[index], base)

    def keys(self, held: Held) -> list[Any]:
        """Return a dict's keys, plain."""
        return [self._hash(key) for key in self.plain(list(dict.keys(held.raw)))]

    def _admitted(self, value: Any) -> Any:
        kind = type(value)  # compared by `is`: a metaclass may do anything in its own `==`
        return value if kind is Held or kind is Unavailable else admit(value)

    def _opened(self, value: Any) -> Held:
        """Return a container, held."""
        if type(value) is Unavailable:
            raise MetricUnavailable([value.name])
        if type(value) is str:
            self.budget.charge(len(value))
            value = list(value)
        held = value if type(value) is Held else admit(value)
        if type(held) is not Held:
            kind = type(held).__name__
            raise RuleTypeError(
                f"{INCORRECT}: {with_article(kind)} holds nothing that could be looked at, got {describe(held)}."
            )
        return held

    def _index(self, key: Any) -> int | slice:
        """Return an index or a slice whose parts are plain whole numbers."""
        parts = (key.start, key.stop, key.step) if type(key) is slice else (key,)
        plain = [self.plain(part) for part in parts]
        if any(type(part) not in (int, bool, NONE) for part in plain) or plain == [None]:
            raise RuleTypeError(f"{INCORRECT}: an index is a whole number, got {self.plain(key)!r:.80}.")
        return slice(*plain) if type(key) is slice else int(plain[0])

    def _entry(self, held: Held, key: Any) -> Any:
        keys: Iterable[Any] = dict.keys(held.raw)
        values = held.raw
        self.budget.charge(len(held))
        if not _are_all(keys, str):  # another kind of key could do anything when it is compared
            keys = self.keys(held)
            values = dict(zip(keys, dict.values(held.raw), strict=True))
        found = dict.get(values, key, MISSING)  # a subclass could do anything where a key is missing
        if found is MISSING:
            raise KeyError(f"there is no key {key!r:.80}.{_near(key, keys)}")
        return self._admitted(found)

    def _scalar(self, value: Any) -> Any:
        if type(value) is int:
            check_bits(value.bit_length())
            self.budget.charge(1 + value.bit_length() // 64)
        else:
            self.budget.charge(1 + len(value) // 32 if type(value) is str else 1)
        return value

    def _container(self, held: Held, depth: int) -> Any:
        raw, base, size = held.raw, held.base, len(held)
        self.budget.charge(25 + (5 * size if base in (set, frozenset) else size // 4))
        if base is dict:
            self.budget.charge(10 * size)
            return {self._hash(self.plain(key, depth)): self.plain(value, depth) for key, value in dict.items(raw)}
        into: Callable[[Iterable[Any]], Any] = {deque: list, frozenset: set}.get(base, base)
        if self._is_one_kind(held):
            return into(base.__iter__(raw))
        self.budget.charge(5 * size)
        parts = (self.plain(each, depth) for each in base.__iter__(raw))
        return into(map(self._hash, parts) if into is set else parts)

    def _hash(self, value: Any) -> Any:
        """Return a value that is about to be hashed, paid for: it may be compared with all others that there are."""
        if type(value) is tuple:
            self.budget.charge(TUPLE + len(value) * TUPLE // 10)
            for each in value:
                self._hash(each)
        return value

    def _is_one_kind(self, held: Held) -> bool:
        """Whether a container, such as a metric's long window, holds only floats, only texts or only whole numbers."""
        raw, every = held.raw, held.base.__iter__
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
    """Whether values are of exactly this type; asks none of them, nor their types."""
    return all(map(is_, map(type, values), repeat(kind)))


def _near(key: object, keys: Iterable[Any]) -> str:
    """Return the tail of an error sentence about a missing key."""
    names = [each for each in keys if type(each) is str and len(each) < 80]
    return known_names(key, names) if type(key) is str and len(key) < 80 and len(names) <= SHOWN_KEYS else ""
