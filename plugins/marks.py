"""`@on(SomeEvent)`: the mark that makes a method a handler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from ..events import Event, Lane, Run
from ..events.bus import When
from ..events.checks import check_event

P = TypeVar("P")
E = TypeVar("E", bound=Event)
E1 = TypeVar("E1", bound=Event)
E2 = TypeVar("E2", bound=Event)
E3 = TypeVar("E3", bound=Event)
E_co = TypeVar("E_co", bound=Event, covariant=True)
_MARK = "__heliograph_mark__"


@dataclass(frozen=True, slots=True)
class Subscription:
    """What `@on` says of a method."""

    events: tuple[type[Event], ...]
    lane: Lane
    before: frozenset[str]
    after: frozenset[str]
    when: When | None


class Marker(Generic[E_co]):
    """The decorator that `on` returns; it leaves the method itself as it is."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    def __call__(self: Marker[E], method: Callable[[P, Run, E], None]) -> Callable[[P, Run, E], None]:
        """Mark the method."""
        if hasattr(method, _MARK):
            raise TypeError(
                f"{method.__qualname__} is marked with @on twice: name both events in one, @on(EpochEnd, TrainEnd)."
            )
        setattr(method, _MARK, self._subscription)
        return method


@overload
def on(
    event: type[E1],
    /,
    *,
    lane: Lane = ...,
    before: str | tuple[str, ...] = ...,
    after: str | tuple[str, ...] = ...,
    when: When | None = ...,
) -> Marker[E1]: ...
@overload
def on(
    event: type[E1],
    event2: type[E2],
    /,
    *,
    lane: Lane = ...,
    before: str | tuple[str, ...] = ...,
    after: str | tuple[str, ...] = ...,
    when: When | None = ...,
) -> Marker[E1 | E2]: ...
@overload
def on(
    event: type[E1],
    event2: type[E2],
    event3: type[E3],
    /,
    *,
    lane: Lane = ...,
    before: str | tuple[str, ...] = ...,
    after: str | tuple[str, ...] = ...,
    when: When | None = ...,
) -> Marker[E1 | E2 | E3]: ...
def on(
    *events: type[Event],
    lane: Lane = Lane.DECIDE,
    before: str | tuple[str, ...] = (),
    after: str | tuple[str, ...] = (),
    when: When | None = None,
) -> Marker[Any]:
    """Mark a method `(self, run, event)` as a handler of one or more events.

    Args:
        *events: event classes.
        lane: `TRANSFORM`, `MEASURE`, `DECIDE` (the default), `PERSIST` or `REPORT`.
        before: names of plugins whose handlers of the same lane run after this one.
        after: names of plugins whose handlers of the same lane run before this one.
        when: a filter, such as `Every(steps=10)`; every plugin object has its own copy.

    Raises:
        TypeError: no event, or something that is not an event class.
    """
    if not events:
        raise TypeError("@on() needs at least one event class, as in @on(EpochEnd).")
    for event in events:
        check_event(event)
    return Marker(Subscription(events, Lane(lane), _names(before), _names(after), when))


def marked_methods(plugin: object) -> Iterator[tuple[str, Subscription]]:
    """Yield the marked method names of an object; an override without a mark of its own keeps the inherited one."""
    seen: set[str] = set()
    for kind in type(plugin).__mro__:
        for name, method in vars(kind).items():
            subscription = getattr(method, _MARK, None)
            if isinstance(subscription, Subscription) and name not in seen:
                seen.add(name)
                yield name, subscription


def _names(names: str | tuple[str, ...]) -> frozenset[str]:
    return frozenset([names] if isinstance(names, str) else names)
