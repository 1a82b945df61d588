"""Checks of arguments (numbers, names, event classes), and texts of errors, counts and positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from math import isinf, isnan
from numbers import Integral, Real
from operator import ge, gt, le, lt
from os import PathLike
from typing import Any, TypedDict, TypeGuard, TypeVar, Unpack

from .catalogue import CATALOGUE, Event

COMPARISONS = {"at_least": ge, "more_than": gt, "at_most": le, "less_than": lt}
PLAIN = frozenset({bool, int, float, str, bytes, type(None)})  # types whose values are saved as they are
N = TypeVar("N", int, float)


class Bounds(TypedDict, total=False):
    at_least: float
    more_than: float
    at_most: float
    less_than: float


def known_names(given: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message: the closest allowed name, then all of them."""
    names = sorted(allowed)
    return f"{did_you_mean(given, names)} Known: {', '.join(names) or 'none'}."


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return the question whether the closest allowed name is meant, or ""."""
    near = get_close_matches(given, sorted(allowed), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(text: object) -> str:
    """Return a text as one line, with control characters escaped."""
    line = str(text).translate({9: 32, 10: 32})  # tabs and line feeds as spaces
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in line
    )


def is_number(value: object) -> TypeGuard[float]:
    """True for a real number of Python or NumPy, including NaN; False for bools."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole_number(value: object) -> TypeGuard[int]:
    """True for an integer of Python or NumPy; False for 1.0 and for bools."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(
    what: str, value: object, *, of: str = "", finite: bool = True, or_else: str = "", **bounds: Unpack[Bounds]
) -> float:
    """Check a real number and return it as a Python number.

    NumPy's numbers are accepted; True, False and NaN are not.

    Args:
        what: the name of the argument, for the error.
        value: the value of the argument.
        of: what the number counts, such as seconds, for the error.
        finite: whether infinity is refused.
        or_else: what else the argument may be, such as None, for the error.
        bounds: the limits, such as `at_least=0`.

    Raises:
        ValueError: the value is not such a number.
    """
    number = int(value) if is_whole_number(value) else float(value) if is_number(value) else None
    if isinstance(number, float) and (isnan(number) or (finite and isinf(number))):
        number = None
    return _check(number, f"a {'finite ' * finite}number", what, value, of, or_else, bounds)


def check_whole_number(what: str, value: object, *, of: str = "", or_else: str = "", **bounds: Unpack[Bounds]) -> int:
    """Check an integer and return it as a Python integer.

    NumPy's integers are accepted; True, False and floats such as 1.0 are not. See `check_number` for the arguments and
    the error.
    """
    number = int(value) if is_whole_number(value) else None
    return _check(number, "a whole number", what, value, of, or_else, bounds)


def check_flag(what: str, value: object, *, or_else: str = "") -> None:
    """Raise TypeError unless a value is True or False.

    `or_else` names what else the argument may be, for the error.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} is True or False" + f", or {or_else}" * bool(or_else) + f", got {value!r}.")


def _check(
    number: N | None, kind: str, what: str, value: object, of: str, or_else: str, bounds: Mapping[str, Any]
) -> N:
    if number is None or not all(COMPARISONS[name](number, bound) for name, bound in bounds.items()):
        limits = " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())
        allowed = kind + f" of {of}" * bool(of) + f", {limits}" * bool(limits) + f", or {or_else}" * bool(or_else)
        raise ValueError(f"{what} must be {allowed}; got {value!r}.")
    return number


def describe(receiver: Callable[..., Any]) -> str:
    """Return the qualified name of a callable."""
    return getattr(receiver, "__qualname__", None) or type(receiver).__name__


def check_event(event: object) -> None:
    """Raise TypeError unless `event` is a concrete event class."""
    if not isinstance(event, type) or not issubclass(event, Event) or event is Event:
        name = event if isinstance(event, str) else getattr(event, "__name__", repr(event))
        camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        names = [kind.__name__ for kind in CATALOGUE]
        if isinstance(event, str) and camel in names:
            raise TypeError(f"Pass the event class, on({camel}), instead of a string; got {event!r}.")
        raise TypeError(f"Unknown event {name!r}: pass a subclass of heliograph.Event.{known_names(camel, names)}")


def check_path(what: str, value: object, of: str = "a file") -> None:
    """Raise TypeError unless a value is a path.

    `what` is the name of the argument, `of` what the path is of, for the error.
    """
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{what} takes the path of {of}, got {value!r}.")


def error_text(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001  # the text of the exception may itself be broken
        return f"<its text raised {type(failure).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {error_text(error)}".removesuffix(": ")


def is_interrupt(error: BaseException) -> bool:
    group = error if isinstance(error, BaseExceptionGroup) else None
    return isinstance(error, KeyboardInterrupt) or (group is not None and group.subgroup(KeyboardInterrupt) is not None)


def count(number: float, singular: str, plural: str) -> str:
    """Return a number with its noun in singular or plural, such as `3 steps`."""
    return f"{number} {singular if number == 1 else plural}"


def place_of(run: Any) -> str:
    progress, collection = run.progress, run.work.collection
    within = "" if collection is None else collection.place
    return f"in {run.phase}{within}, epoch {progress.epoch}, batch {progress.batch}, step {progress.steps}"
