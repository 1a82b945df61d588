"""What is checked when something is connected, so that nothing need be checked when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from .catalogue import CATALOGUE, Event
from .suggest import known_names

HANDLER_FORM = "a handler takes (run, event), behind self in a plugin, returns nothing and is not async"


def describe(receiver: Callable[..., Any]) -> str:
    """Return a receiver's qualified name."""
    return getattr(receiver, "__qualname__", None) or type(receiver).__name__


def check_event(event: object) -> None:
    """Raise TypeError unless `event` is a concrete event class."""
    if not isinstance(event, type) or not issubclass(event, Event) or event is Event:
        name = event if isinstance(event, str) else getattr(event, "__name__", repr(event))
        camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        raise TypeError(
            f"Unknown event {name!r}: an event is a subclass of heliograph.Event, given as the class itself."
            + known_names(camel, [kind.__name__ for kind in CATALOGUE])
        )
    params = event.__dict__.get("__dataclass_params__")
    if params is None or not params.frozen:
        raise TypeError(f"Event {event.__name__} must be decorated with @dataclass(frozen=True, slots=True).")


def refuse_coroutine(receiver: Callable[..., Any]) -> None:
    """Raise TypeError for a function whose call would only make a coroutine or generator that nobody runs."""
    if inspect.iscoroutinefunction(receiver) or inspect.isgeneratorfunction(receiver):
        raise TypeError(f"{describe(receiver)} would never run its body: {HANDLER_FORM}, nor a generator.")


def check_receiver(receiver: Callable[..., Any], event: type[Event]) -> None:
    """Raise TypeError unless `receiver(run, event=event)` fits its signature and its annotation admits the event."""
    if not callable(receiver):
        raise TypeError(f"{receiver!r} is not callable: {HANDLER_FORM}.")
    refuse_coroutine(receiver)
    signature = inspect.signature(receiver)
    try:
        signature.bind(object(), event=object())
    except TypeError as error:
        raise TypeError(
            f"{describe(receiver)}{signature} cannot hear {event.__name__}: {HANDLER_FORM} ({error})."
        ) from None
    admitted = _annotated_event(receiver)
    if admitted and not any(issubclass(event, kind) for kind in admitted):
        names = " | ".join(kind.__name__ for kind in admitted)
        raise TypeError(
            f"{describe(receiver)} is subscribed to {event.__name__}, but its parameter `event` is annotated {names}."
        )


def _annotated_event(receiver: Callable[..., Any]) -> tuple[type, ...]:
    """Return the classes that the annotation of `event` admits; none where it says nothing that can be read."""
    function = receiver if inspect.isroutine(receiver) else getattr(type(receiver), "__call__", receiver)  # noqa: B004
    try:
        hint = get_type_hints(function).get("event")
    except (NameError, TypeError):  # a name that exists for the type checker only; it has checked the rest
        return ()
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kind for kind in kinds if isinstance(kind, type))
