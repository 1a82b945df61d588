"""What rules read: the metrics' values, turned into plain ones where they are looked at."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from heliograph.spi import with_article

from ..errors import MetricUnavailable, RuleTypeError
from ..text import show
from .kinds import NONE

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
