"""The order of the handlers of an event: by lane, then registration, then `before` and `after`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..events import Bus, Event
from ..events.bus import Position
from .marks import Marker


@dataclass(slots=True, eq=False)
class Handler:
    """A bound method of a plugin with its mark.

    Attributes:
        plugin: the plugin's name.
        method: the method.
        mark: its mark.
        when: a copy of the mark's filter.
        place: its place among the handlers of the event.
    """

    plugin: str
    method: Callable[..., Any]
    mark: Marker[Any]
    when: Any
    place: int = 0

    @property
    def position(self) -> Position:
        return self.mark.lane, self.place


class HandlerOrder:
    """The order of the handlers of all events of a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._handlers: dict[type[Event], list[Handler]] = {}  # in the order of their registration

    def add(self, handlers: Iterable[tuple[type[Event], Handler]]) -> None:
        """Order a plugin's handlers.

        Raises:
            ValueError: there is a cycle; nothing was changed.
        """
        changed: dict[type[Event], list[Handler]] = {}
        for event, handler in handlers:
            changed.setdefault(event, [*self._handlers.get(event, ())]).append(handler)
        self._move({event: ordered(event, listed) for event, listed in changed.items()})
        self._handlers |= changed

    def remove(self, event: type[Event], handler: Handler) -> None:
        self._handlers[event].remove(handler)
        self._move({event: ordered(event, self._handlers[event])})

    def _move(self, orders: dict[type[Event], list[Handler]]) -> None:
        for event, handlers in orders.items():
            for place, handler in enumerate(handlers):
                handler.place = place
            self._bus.signal(event).move((handler.method, handler.position) for handler in handlers)


def ordered(event: type[Event], handlers: list[Handler]) -> list[Handler]:
    """Return handlers by lane; in a lane, the next one is the first registered of those that may run next.

    Raises:
        ValueError: there is a cycle.
    """
    of_plugin: dict[str, list[Handler]] = {}
    for handler in handlers:
        of_plugin.setdefault(handler.plugin, []).append(handler)
    earlier: dict[Handler, list[Handler]] = {handler: [] for handler in handlers}  # those that must run before it
    for handler in handlers:
        for name in handler.mark.names_after:
            earlier[handler] += of_plugin.get(name, ())
        for name in handler.mark.names_before:
            for later in of_plugin.get(name, ()):
                earlier[later].append(handler)
    remaining = dict.fromkeys(sorted(handlers, key=lambda handler: handler.mark.lane))
    result: list[Handler] = []
    while remaining:
        first = next(iter(remaining))
        lane = (handler for handler in remaining if handler.mark.lane == first.mark.lane)
        chosen = next((handler for handler in lane if not any(other in remaining for other in earlier[handler])), None)
        if chosen is None:
            way = [first]
            while way[-1] not in way[:-1]:  # a handler without a demand waits for the earlier lane
                way.append(next((other for other in earlier[way[-1]] if other in remaining), first))
            cycle = way[way.index(way[-1]) :][::-1]
            names = " -> ".join(f"{handler.plugin} ({handler.mark.lane.name})" for handler in cycle)
            raise ValueError(
                f"The handlers of {event.__name__} cannot be ordered: before, after and lanes form a cycle: {names}."
            )
        del remaining[chosen]
        result.append(chosen)
    return result
