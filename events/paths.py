"""Paths as users give them."""

from __future__ import annotations

from os import PathLike


def check_path(what: str, value: object, of: str = "a file") -> None:
    """Raise TypeError unless a value is a path; `what` is the argument, and `of` says what is there."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{what} takes the path of {of}, got {value!r}.")
