"""`@on(SomeEvent)`: marks a method as a handler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack, overload

from ..events import Event, Lane
from ..events.bus import When
from ..events.checks import check_event
from ..events.signatures import check_filter, check_lane

if TYPE_CHECKING:
    from ..events import Run

P = TypeVar("P")
E = TypeVar("E", bound=Event)
E1 = TypeVar("E1", bound=Event)
E2 = TypeVar("E2", bound=Event)
E3 = TypeVar("E3", bound=Event)
E4 = TypeVar("E4", bound=Event)
E_co = TypeVar("E_co", bound=Event, covariant=True)
_MARK = "__heliograph_mark__"


class MarkOptions(TypedDict, total=False):
    lane: Lane
    before: str | tuple[str, ...]
    after: str | tuple[str, ...]
    when: When | None
    optional: bool
    idle_until: str


@dataclass(frozen=True, slots=True)
class Marker(Generic[E_co]):
    """The arguments of `@on`, as a decorator that does not change the method."""

    events: tuple[type[Event], ...]
    lane: Lane = Lane.DECIDE
    before: str | tuple[str, ...] = ()
    after: str | tuple[str, ...] = ()
    when: When | None = None
    optional: bool = False
    idle_until: str = ""

    def __call__(self: Marker[E], method: Callable[[P, Run, E], None]) -> Callable[[P, Run, E], None]:
        if hasattr(method, _MARK):
            name = method.__qualname__
            raise TypeError(f"{name} is marked with @on twice: name both events in one, @on(EpochEnd, TrainEnd).")
        setattr(method, _MARK, self)
        return method

    @property
    def names_before(self) -> Sequence[str]:
        return (self.before,) if isinstance(self.before, str) else self.before

    @property
    def names_after(self) -> Sequence[str]:
        return (self.after,) if isinstance(self.after, str) else self.after


@overload
def on(event: type[E1], /, **options: Unpack[MarkOptions]) -> Marker[E1]: ...
@overload
def on(event: type[E1], event2: type[E2], /, **options: Unpack[MarkOptions]) -> Marker[E1 | E2]: ...
@overload
def on(
    event: type[E1], event2: type[E2], event3: type[E3], /, **options: Unpack[MarkOptions]
) -> Marker[E1 | E2 | E3]: ...
@overload
def on(
    event: type[E1], event2: type[E2], event3: type[E3], event4: type[E4], /, **options: Unpack[MarkOptions]
) -> Marker[E1 | E2 | E3 | E4]: ...
def on(*events: type[Event], **options: Unpack[MarkOptions]) -> Marker[Any]:
    """Mark a method `(self, run, event)` as a handler of one or more events.

    Args:
        *events: event classes.
        **options: `lane` is one of `TRANSFORM`, `MEASURE`, `DECIDE` (the default), `PERSIST` and `REPORT`. `before` and
            `after` are names of plugins: the handler runs before or after their handlers of the same lane. `when` is a
            filter such as `Every(steps=10)`; every plugin object gets a copy. `optional=True` suppresses the warning
            that the result has if a training never calls the handler. `idle_until` is the name of a method `(self,
            run)` that returns the count at which the handler is next due, such as `(attrgetter("steps"), 1000)`, or
            None if it is unknown; the handler is not called before.

    Raises:
        TypeError: no event is passed, an event is not an event class, or `lane` or `when` is invalid.
    """
    if not events:
        raise TypeError("@on() needs at least one event class, as in @on(EpochEnd).")
    for event in events:
        check_event(event)
    check_lane(options.get("lane", Lane.DECIDE), Lane)
    check_filter("when=", options.get("when"))
    return Marker(events, **options)


def marked_methods(kind: type) -> Iterator[tuple[str, Marker[Any]]]:
    """Yield the names and marks of a class's handlers.

    An override without a mark keeps the inherited mark, except its `idle_until`, which need not fit the override.
    """
    marks: dict[str, Marker[Any]] = {}
    for base in reversed(kind.__mro__):
        for name, method in vars(base).items():
            if isinstance(mark := getattr(method, _MARK, 0), Marker):
                marks[name] = mark
            elif name in marks:
                marks[name] = replace(marks[name], idle_until="")
    yield from marks.items()
