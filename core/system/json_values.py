"""Values for `json.dump`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any


def to_json_value(value: Any) -> Any:
    """Return a value as JSON has it: of an object its public fields, of NaN, infinities and other objects the text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        own = (each.name for each in fields(value) if not each.name.startswith("_"))
        return {name: to_json_value(getattr(value, name)) for name in own}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [to_json_value(item) for item in value]
    return str(value)
