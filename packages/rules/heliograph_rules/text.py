"""Values in sentences."""

from __future__ import annotations

from reprlib import Repr
from typing import Any


class _Repr(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 100
        self.maxlevel = 3  # six items of six items of six: a sentence stays one, whatever a file holds

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python writes no number of so many digits
            return f"<a whole number of {value.bit_length()} bits>"


_REPR = _Repr()


def show(value: Any) -> str:
    """Return a value as Python writes it, shortened where it is long."""
    return _REPR.repr(value)
