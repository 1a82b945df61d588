"""Convert the fields of an event to plain data of a bounded size."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
from heliograph.spi import describe_error
from torch import Tensor

CHARACTERS = 2_000  # of a string
NAME = 200  # characters of a name
ITEMS = 200  # of a list or mapping
METRICS = 2_000
DEPTH = 6
TOTAL = 20_000  # characters of a value, roughly
BITS = 512  # of an integer


def shorten(text: str, limit: int = CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"


def to_plain(value: Any) -> Any:
    """Return a value as None, bool, int, float, str, and lists and dicts of them; omissions are marked."""
    return _Converter().convert(value, DEPTH)


def to_plain_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """Return metrics by name, and the number of omitted ones."""
    floats = {shorten(str(name), NAME): float(value) for name, value in islice(metrics.items(), METRICS)}
    return floats, len(metrics) - len(floats)


class _Converter:
    """Convert one value up to a total size."""

    def __init__(self) -> None:
        self._budget = TOTAL

    def convert(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            value = value.name
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | float):
            self._budget -= 20
            return value if value is None or isinstance(value, bool) else float(value)
        if isinstance(value, int) and value.bit_length() <= BITS:
            self._budget -= 20
            return int(value)
        if isinstance(value, Mapping) and depth:
            return self._mapping(value, depth)
        if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray) and depth:
            return self._items(value, depth)
        return self._text(value)

    def _text(self, value: Any) -> str:
        text = shorten(_describe(value), max(20, min(CHARACTERS, self._budget)))
        self._budget -= len(text)
        return text

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, item in islice(value.items(), ITEMS):
            if self._budget <= 0:
                break
            items[self._text(key)] = self.convert(item, depth - 1)
        if len(items) < len(value):
            items["…"] = f"(+{len(value) - len(items)} items)"
        return items

    def _items(self, value: Sequence[Any] | Set[Any], depth: int) -> list[Any]:
        items: list[Any] = []
        for item in islice(value, ITEMS):
            if self._budget <= 0:
                break
            items.append(self.convert(item, depth - 1))
        if len(items) < len(value):
            items.append(f"… (+{len(value) - len(items)} items)")
        return items


def _describe(value: Any) -> str:
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Tensor):  # its numbers are not read, since that waits for the device
        return f"tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    if isinstance(value, np.ndarray):
        return f"array of shape {list(value.shape)}, {value.dtype}"
    if isinstance(value, BaseException):
        return describe_error(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= BITS else f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # the text names it
        return f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
