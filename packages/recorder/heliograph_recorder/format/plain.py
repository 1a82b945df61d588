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
ITEMS = 100  # of a list or mapping
METRICS = 2_000
DEPTH = 4
BITS = 512  # of an integer


def shorten(text: str, limit: int = CHARACTERS) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"


def to_plain(value: Any, depth: int = DEPTH) -> Any:
    """Return a value as None, bool, int, float, str, and lists and dicts of them; omissions are marked."""
    if isinstance(value, enum.Enum):
        value = value.name
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and value.bit_length() <= BITS:
        return int(value)
    if isinstance(value, Mapping) and depth:
        items = {_text(key): to_plain(item, depth - 1) for key, item in islice(value.items(), ITEMS)}
        return items | ({"…": f"(+{len(value) - ITEMS} items)"} if len(value) > ITEMS else {})
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray) and depth:
        elements = [to_plain(item, depth - 1) for item in islice(value, ITEMS)]
        return elements + [f"… (+{len(value) - ITEMS} items)"] * (len(value) > ITEMS)
    return _text(value)


def to_plain_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """Return metrics by name, and the number of omitted ones."""
    floats = {shorten(str(name), NAME): float(value) for name, value in islice(metrics.items(), METRICS)}
    return floats, len(metrics) - len(floats)


def _text(value: Any) -> str:
    if isinstance(value, str | PurePath):
        return shorten(str(value))
    if isinstance(value, Tensor):  # its numbers are not read, since that waits for the device
        return f"tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    if isinstance(value, BaseException):
        return shorten(describe_error(value))
    try:
        return shorten(repr(value))
    except Exception as error:  # noqa: BLE001  # the text names it
        return f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"
