"""A check of what a user's function returns."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor


def check_numbers(returned: Any, function: str) -> dict[str, Tensor | float]:
    """Return the numbers by name.

    Raises:
        TypeError: it is not a dict of numbers.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(f"{function} returns a dict of numbers, such as {{'accuracy': 0.9}}; got {returned!r:.200}.")
    numbers: dict[str, Tensor | float] = {}
    for name, value in returned.items():
        if isinstance(value, Real):
            numbers[name] = float(value)
        elif isinstance(value, Tensor):
            numbers[name] = value
        else:
            raise TypeError(f"{function} returns a dict of numbers, to be averaged; got {name!r}: {value!r:.200}.")
    return numbers
