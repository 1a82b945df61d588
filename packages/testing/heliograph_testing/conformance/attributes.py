"""What a plugin holds, as plain data that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from heliograph import Plugin
from heliograph.core.objects.values import show_both
from heliograph.spi import differing, encode

Value = Mapping[str, Any]  # an encoded one
DESCRIPTORS = (FunctionType, staticmethod, classmethod, property)


def class_attributes(plugin: Any) -> dict[str, Value]:
    """Return the attributes of an object's classes, by `Class.name`: no methods, and none of `Plugin`."""
    return {
        f"{kind.__qualname__}.{name}": encode(value)
        for kind in type(plugin).__mro__
        if kind not in (object, *Plugin.__mro__)
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc")) and not isinstance(value, DESCRIPTORS)
    }


def is_same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal, bit for bit."""
    return not any(differing({"": encode(one)}, {"": encode(other)}))


def list_changes(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[str]:
    """Yield what differs, as `count was 0 and is 3`."""
    for name, one, other in differing(before, now):
        was, value = show_both(one, other)
        yield f"{name} was {was} and is {value}"
