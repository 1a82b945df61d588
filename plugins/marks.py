"""`@on(SomeEvent)`: the mark that makes a method a handler."""

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


class Options(TypedDict, total=False):
    """The keywords of `on`."""

    lane: Lane
    before: str | tuple[str, ...]
    after: str | tuple[str, ...]
    when: When | None
    optional: bool
    idle_until: str


@dataclass(frozen=True, slots=True)
class Marker(Generic[E_co]):
    """What `@on` says of a method; as a decorator, it leaves the method itself as it is."""

    events: tuple[type[Event], ...]
    lane: Lane = Lane.DECIDE
    before: str | tuple[str, ...] = ()
    after: str | tuple[str, ...] = ()
    when: When | None = None
    optional: bool = False
    idle_until: str = ""

    def __call__(self: Marker[E], method: Callable[[P, Run, E], None]) -> Callable[[P, Run, E], None]:
        """Mark the method."""
        if hasattr(method, _MARK):
            name = method.__qualname__
            raise TypeError(f"{name} is marked with @on twice: name both events in one, @on(EpochEnd, TrainEnd).")
        setattr(method, _MARK, self)
        return method

    @property
    def names_before(self) -> Sequence[str]:
        """The plugins that the handler must run before."""
        return (self.before,) if isinstance(self.before, str) else self.before

    @property
    def names_after(self) -> Sequence[str]:
        """The plugins that the handler must run after."""
        return (self.after,) if isinstance(self.after, str) else self.after


@overload
def on(event: type[E1], /, **options: Unpack[Options]) -> Marker[E1]: ...
@overload
def on(event: type[E1], event2: type[E2], /, **options: Unpack[Options]) -> Marker[E1 | E2]: ...
@overload
def on(event: type[E1], event2: type[E2], event3: type[E3], /, **options: Unpack[Options]) -> Marker[E1 | E2 | E3]: ...
@overload
def on(
    event: type[E1], event2: type[E2], event3: type[E3], event4: type[E4], /, **options: Unpack[Options]
) -> Marker[E1 | E2 | E3 | E4]: ...
def on(*events: type[Event], **options: Unpack[Options]) -> Marker[Any]:
    """Mark a method `(self, run, event)` as a handler of one or more events.

    Args:
        *events: event classes.
        **options: `lane`, one of `TRANSFORM`, `MEASURE`, `DECIDE` (the default), `PERSIST` and `REPORT`; `before` and
            `after`, names of plugins whose handlers of the same lane run after or before this one; `when`, a filter
            such as `Every(steps=10)`, of which every plugin object has its own copy; `optional`, whether all is well
            where a training never calls it: else the result warns that none of its events came; `idle_until`, the name
            of a method `(self, run)` that returns until which count the handler has nothing to do, which spares the
            calls before that: `return attrgetter("steps"), 1000`, or None where it does not know.

    Raises:
        TypeError: no event, something that is not an event class, or not a lane, or not a filter.
    """
    if not events:
        raise TypeError("@on() needs at least one event class, as in @on(EpochEnd).")
    for event in events:
        check_event(event)
    check_lane(options.get("lane", Lane.DECIDE), Lane)
    check_filter("when=", options.get("when"))
    return Marker(events, **options)


def marked_methods(kind: type) -> Iterator[tuple[str, Marker[Any]]]:
    """Yield the marked method names of a class; an override without a mark of its own keeps the inherited one.

    But not its `idle_until`: what the override has to do, that knows nothing of.
    """
    marks: dict[str, Marker[Any]] = {}
    for base in reversed(kind.__mro__):
        for name, method in vars(base).items():
            if isinstance(mark := getattr(method, _MARK, 0), Marker):
                marks[name] = mark
            elif name in marks:
                marks[name] = replace(marks[name], idle_until="")
    yield from marks.items()
