"""Checks of handler signatures and lanes, and short texts of objects for `repr`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from enum import IntEnum
from os import PathLike
from reprlib import Repr
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .catalogue import Event
from .checks import describe, known_names

HANDLER_FORM = (
    "a handler takes (run, event), after self in a plugin, returns nothing and is not a coroutine or generator"
)


def check_receiver(receiver: Callable[..., Any], event: type[Event]) -> None:
    """Raise TypeError unless `receiver(run, event=event)` is a valid call.

    The annotation of its `event` parameter must also admit the event class.
    """
    _check_signature(receiver, event)
    admitted = _annotated_event(receiver)
    if admitted and not any(issubclass(event, kind) for kind in admitted):
        names = " | ".join(kind.__name__ for kind in admitted)
        raise TypeError(f"{describe(receiver)} is subscribed to {event.__name__}, but annotates `event` as {names}.")


def check_filter(argument: str, when: Any) -> None:
    """Raise TypeError unless a filter is None or can be called with the run."""
    if when is not None and not (callable(when) and takes(when, 1)):
        form = f"{describe(when)}{signature_of(when)}" if callable(when) else repr(when)
        raise TypeError(
            f"{argument} takes a function of the run, such as lambda run: run.progress.epoch >= 3, or a filter such as "
            f"Between(epochs=(2, 5)); got {form}."
        )


def takes(function: Callable[..., Any], count: int) -> bool:
    if (form := signature_of(function)) is None:
        return True
    try:
        form.bind(*[None] * count)
    except TypeError:
        return False
    return True


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def check_lane(lane: object, lanes: type[IntEnum]) -> None:
    """Raise TypeError unless `lane` is a member of `lanes`."""
    if not isinstance(lane, lanes):
        suggestion = known_names(f"Lane.{str(lane).upper()}", [f"Lane.{member.name}" for member in lanes])
        raise TypeError(f"lane= takes a member of heliograph.Lane, got {lane!r}.{suggestion}")


def _check_signature(receiver: Callable[..., Any], event: type[Event]) -> None:
    called = [receiver, getattr(type(receiver), "__call__", receiver)]  # noqa: B004  # inspects the method itself
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(receiver) or any(kind(function) for kind in kinds for function in called):
        raise TypeError(f"{describe(receiver)} cannot handle {event.__name__}: {HANDLER_FORM}.")
    try:
        signature = inspect.signature(receiver)
    except ValueError as error:
        raise TypeError(f"{describe(receiver)} cannot handle {event.__name__}: {error}.") from None
    try:
        signature.bind(object(), event=object())
    except TypeError as error:
        subject = f"{describe(receiver)}{signature} cannot handle {event.__name__}"
        raise TypeError(f"{subject}: {HANDLER_FORM} ({error}).") from None


def _annotated_event(receiver: Callable[..., Any]) -> tuple[type, ...]:
    function = receiver if inspect.isroutine(receiver) else getattr(type(receiver), "__call__", receiver)  # noqa: B004
    only = SimpleNamespace(__annotations__={"event": getattr(function, "__annotations__", {}).get("event", Any)})
    try:  # the names of the other annotations may exist for the type checker only
        hint = get_type_hints(only, getattr(inspect.unwrap(function), "__globals__", {}))["event"]
    except (NameError, TypeError, AttributeError, SyntaxError):  # an annotation for the type checker only
        return ()
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return () if Any in kinds else tuple(kind for kind in kinds if isinstance(kind, type))


class _Short(Repr):
    """Texts of values that fit into one line: no addresses, tensors or module trees."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 60, 100

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, PathLike):
            return self.repr1(str(x), level)
        if name := getattr(x, "__qualname__", ""):  # a function or a class
            return str(name).rpartition(".")[2]
        kind = type(x)
        if shape := getattr(x, "shape", ()):
            return f"{kind.__name__}({', '.join(map(str, shape))})"
        text = "" if hasattr(x, "named_parameters") else repr(x)
        is_short = len(text) <= self.maxother or kind.__module__.startswith("heliograph.")
        is_shown = text and is_short and text.isprintable() and " at 0x" not in text
        return text if is_shown else f"{kind.__name__}(...)"


_SHORT = _Short()


def show_value(value: object) -> str:
    """Return a value as a short text in one line."""
    try:
        return _SHORT.repr(value)
    except Exception:  # noqa: BLE001  # the `__repr__` of a user's class may raise anything
        return f"{type(value).__name__}(...)"


def show_attributes(thing: object) -> str:
    """Return an object's class with its public attributes, for use as `__repr__`."""
    named = ((name, show_value(value)) for name, value in vars(thing).items() if name[:1] != "_")
    shown = [f"{name}={text}" for name, text in named if text not in ("None", "{}", "()", "[]")]
    return f"{type(thing).__name__}({', '.join(shown)})"


def show_list(name: str, items: Iterable[object], arguments: str) -> str:
    """Return a call with a list and more arguments, on one line if it fits."""
    texts = [*map(show_value, items)]
    line = f"{name}([{', '.join(texts)}], {arguments})"
    return (
        line if len(line) <= 120 else "\n".join([f"{name}([", *(f"    {text}," for text in texts), f"], {arguments})"])
    )
