"""The order of the handlers of one event: by lane, then as listed, then as `before` and `after` demand."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf
from operator import attrgetter
from typing import Any

from ..events import Bus, Event
from ..events.bus import Position
from .marks import Marker

SORT_KEY = attrgetter("sort_key")


@dataclass(slots=True, eq=False)
class Handler:
    """A bound method of a plugin and what its mark says.

    Attributes:
        plugin: the plugin's name.
        method: the method.
        mark: what was said of it.
        listed: its number in the list of the handlers of its event.
        sort_key: where it runs among those of its lane.
    """

    plugin: str
    method: Callable[..., Any]
    mark: Marker[Any]
    listed: int = 0
    sort_key: Fraction | int = 0

    @property
    def position(self) -> Position:
        """Its position among all handlers of the event."""
        return self.mark.lane, self.sort_key


class HandlerOrder:
    """The order of the handlers of all events, kept on the bus.

    Args:
        bus: where the handlers are, or will be, connected.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._orders: dict[type[Event], EventOrder] = {}

    def add(self, handlers: Iterable[tuple[type[Event], Handler]]) -> None:
        """Find the positions of a plugin's handlers.

        Raises:
            ValueError: they cannot be ordered; nothing was changed.
        """
        with ExitStack() as undo:
            for event, handler in handlers:
                order = self._orders.setdefault(event, EventOrder(event.__name__))
                self._move(event, order.add(handler))
                undo.callback(self.remove, event, handler)
            undo.pop_all()

    def remove(self, event: type[Event], handler: Handler) -> None:
        """Remove a handler."""
        self._move(event, self._orders[event].remove(handler))

    def _move(self, event: type[Event], handlers: Iterable[Handler]) -> None:
        self._bus.signal(event).move((handler.method, handler.position) for handler in handlers)


class EventOrder:
    """The handlers of one event in the order in which they run; stable where nothing demands otherwise.

    In each lane, of all handlers that may run next, the one that was listed first does. So a handler that no other has
    to follow is added and removed without moving any other; else those that follow are positioned again, one by one.

    Args:
        event: the event's name.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._listed = 0
        self._lanes: dict[int, list[Handler]] = {}
        self._of_plugin: dict[str, list[Handler]] = {}
        self._before: dict[str, list[Handler]] = {}  # those that ask to run before a plugin, by its name
        self._after: dict[str, list[Handler]] = {}

    def add(self, handler: Handler) -> list[Handler]:
        """Place a handler, the last of the list; return it and all that have a new sort key.

        Raises:
            ValueError: the demands, those of the lanes among them, form a cycle; nothing was added.
        """
        for table, names in self._tables(handler):
            for name in names:
                table.setdefault(name, []).append(handler)
        try:
            followers = self._followers(handler)
        except ValueError:
            self._strike(handler)
            raise
        self._listed = handler.listed = self._listed + 1
        lane = self._lanes.setdefault(handler.mark.lane, [])
        if lane[len(lane) - len(followers) :] == followers:  # all others are done before them, as they are now
            _put(handler, lane, len(lane) - len(followers))
            return [handler]
        self._take_out(followers)
        _put(handler, lane, len(lane))
        return [handler, *self._put_back(followers)]

    def remove(self, handler: Handler) -> list[Handler]:
        """Forget a handler; return those that have a new sort key."""
        followers = self._followers(handler)
        self._take_out([handler, *followers])
        self._strike(handler)
        return self._put_back(followers)

    def _strike(self, handler: Handler) -> None:
        for table, names in self._tables(handler):
            for name in names:
                table[name].remove(handler)

    def _tables(self, handler: Handler) -> Iterator[tuple[dict[str, list[Handler]], Iterable[str]]]:
        yield self._of_plugin, (handler.plugin,)
        yield self._before, handler.mark.names_before
        yield self._after, handler.mark.names_after

    def _next(self, handler: Handler) -> Iterator[Handler]:
        """Yield the handlers that have to run after this one, because one of the two says so."""
        for name in handler.mark.names_before:
            yield from self._of_plugin.get(name, ())
        yield from self._after.get(handler.plugin, ())

    def _previous(self, handler: Handler) -> Iterator[Handler]:
        """Yield the handlers that have to run before this one."""
        for name in handler.mark.names_after:
            yield from self._of_plugin.get(name, ())
        yield from self._before.get(handler.plugin, ())

    def _followers(self, handler: Handler) -> list[Handler]:
        """Return all handlers of its lane that have to run after one, because of others too, in their present order.

        Raises:
            ValueError: there is a cycle; where there was none without this handler, it leads through it.
        """
        for other in self._previous(handler):
            if other.mark.lane > handler.mark.lane:
                raise self._cycle([other, handler, other])
        found: dict[Handler, Handler] = {}  # each with the one that it was found from
        ends = [handler]
        while ends:
            here = ends.pop()
            for other in self._next(here):
                if other is handler or other.mark.lane < here.mark.lane:
                    way = [other, *_way(here, found)][::-1]
                    raise self._cycle(way if other is handler else [*way, handler])
                if other.mark.lane == here.mark.lane and other not in found:
                    found[other] = here
                    ends.append(other)
        return sorted(found, key=SORT_KEY)

    def _take_out(self, handlers: Iterable[Handler]) -> None:
        for handler in handlers:
            lane = self._lanes[handler.mark.lane]
            del lane[bisect_left(lane, handler.sort_key, key=SORT_KEY)]

    def _put_back(self, handlers: list[Handler]) -> list[Handler]:
        """Place handlers, given in an order that is allowed: each before the first one that was listed after it.

        Those with a new position are returned.
        """
        moved = []
        for handler in handlers:
            lane = self._lanes[handler.mark.lane]
            before = [each.sort_key for each in self._previous(handler) if each.mark.lane == handler.mark.lane]
            position = bisect_right(lane, max(before), key=SORT_KEY) if before else 0
            while position < len(lane) and lane[position].listed < handler.listed:
                position += 1
            if _put(handler, lane, position):
                moved.append(handler)
        return moved

    def _cycle(self, handlers: list[Handler]) -> ValueError:
        names = " -> ".join(f"{handler.plugin} ({handler.mark.lane.name})" for handler in handlers)
        return ValueError(
            f"The handlers of {self._event} cannot be ordered, before/after and lanes form a cycle: {names}."
        )


def _put(handler: Handler, lane: list[Handler], position: int) -> bool:
    """Put a handler into its lane; return whether that takes another sort key than it has."""
    left: Any = lane[position - 1].sort_key if position else -inf
    right: Any = lane[position].sort_key if position < len(lane) else inf
    lane.insert(position, handler)
    if left < handler.sort_key < right:
        return False
    if right == inf:
        handler.sort_key = floor(left) + 1
    else:
        handler.sort_key = ceil(right) - 1 if left == -inf else Fraction(left + right) / 2
    return True


def _way(handler: Handler, found: dict[Handler, Handler]) -> Iterator[Handler]:
    """Yield a handler, the one that it was found from, and so on."""
    yield handler
    while handler in found:
        handler = found[handler]
        yield handler
