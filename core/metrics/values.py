"""The values of metrics by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self


class Metrics(dict[str, float]):
    """Values by name. What is put in is kept as a number of Python's own, so that it can be logged and saved.

    Args:
        values: the first ones.

    Raises:
        TypeError: at once, where something is put in that is not a number, or by a name that is not a string.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.update(values or {})

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"A metric goes by a name such as 'train/loss', got {name!r}.")
        super().__setitem__(name, _number(name, value))

    def update(self, *others: Any, **more: Any) -> None:
        """Put in what other metrics hold."""
        for name, value in dict(*others, **more).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = 0.0) -> float:
        """Return a value, which is put in unless it is there."""
        if name not in self:
            self[name] = default
        return self[name]

    def __ior__(self, others: Any) -> Self:  # type: ignore[misc, override]  # as update does
        self.update(others)
        return self


def is_metric_object(value: Any) -> bool:
    """Return whether something measures by `update`, `compute` and `reset`."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("update", "compute", "reset")
    )


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # of which float makes a number, too
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        given = repr(value) if isinstance(value, str | bytes | None) else f"a value of type {type(value).__name__}"
        raise TypeError(
            f"The metric {name!r} was given {given}: it takes a number, or a tensor of one element."
        ) from None
