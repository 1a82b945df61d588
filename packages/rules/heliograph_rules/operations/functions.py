"""Functions of the user's that rule files can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from heliograph.spi import describe, known_names

from ..errors import RuleKeyError

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
_FUNCTIONS: dict[str, Function] = {}


def register_function(function: F, name: str | None = None) -> F:
    """Let rule files name a function that `CallFunction` calls; return it, so that this can be a decorator.

    Args:
        function: called as `function(run, firing, **arguments)`; what it returns is not looked at.
        name: its name in files; its own by default.

    Raises:
        TypeError: it is not a function.
        ValueError: another one has this name.
    """
    called = getattr(function, "__name__", None) if name is None else name
    if not callable(function) or not isinstance(called, str):
        raise TypeError(
            f"register_function takes a function, with a name where it has none, got {function!r}, {name!r}."
        )
    if (other := _FUNCTIONS.setdefault(called, function)) is not function:
        raise ValueError(
            f"Another function is registered as {called!r}, {describe(other)}: give this one another name."
        )
    return function


def function(name: str, given: Mapping[str, Function]) -> Function:
    """Return the function of a name.

    Args:
        name: its name in files.
        given: further functions, by their names.

    Raises:
        RuleKeyError: there is none.
        ValueError: one is given, and another one is registered.
    """
    known = _FUNCTIONS | dict(given)
    if name not in known:
        raise RuleKeyError(f"Undefined function {name!r}.{known_names(name, known)}")
    if name in given and (other := _FUNCTIONS.get(name, given[name])) is not given[name]:
        raise ValueError(f"Another function is registered as {name!r}, {describe(other)}: give this one another name.")
    return known[name]
