"""Filters in a configuration: `{epochs: 1}` is `Every(epochs=1)`, `{steps: [10, 100]}` is `At(steps=[10, 100])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heliograph import At, Between, Every, Filter, Once

FORM = (
    "A filter is written as {epochs: 1} for Every(epochs=1), {steps: [10, 100]} for At(steps=[10, 100]), "
    "{Between: {epochs: [2, 5]}} for Between(epochs=(2, 5)), {Once: {}} for Once()"
)
OTHERS: dict[str, Callable[..., Filter]] = {"Between": Between, "Once": Once}


def filter_of(value: Any) -> Filter:
    """Return the filter that a value of a configuration describes.

    Raises:
        ValueError: it has another form, or the filter refuses its numbers.
    """
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{FORM}; got {value!r}.")
    name, arguments = next(iter(value.items()))
    if len(value) == 1 and name in OTHERS and (arguments is None or isinstance(arguments, dict)):
        return OTHERS[name](**(arguments or {}))
    if value.keys() & OTHERS:
        raise ValueError(f"{FORM}; got {value!r}.")
    several = any(isinstance(each, list) for each in value.values())
    return At(**value) if several else Every(**value)


def plain_form(given: Filter) -> dict[str, Any]:
    """Return what `filter_of` makes the filter of."""
    if isinstance(given, Once):
        return {"Once": {}}
    if isinstance(given, Between):
        return {"Between": {given.unit: given.values}}
    if isinstance(given, Every):
        return {given.unit: given.values[0]} | ({} if given.after is None else {"after": given.after})
    return {given.unit: given.values}
