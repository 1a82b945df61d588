"""The order of the handlers of an event: by lane, then registration, then `before` and `after`."""

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
    """A bound method of a plugin with its mark.

    Attributes:
        plugin: the plugin's name.
        method: the method.
        mark: its mark.
        listed: its registration number among the handlers of the event.
        sort_key: its position in its lane.
    """

    plugin: str
    method: Callable[..., Any]
    mark: Marker[Any]
    listed: int = 0
    sort_key: Fraction | int = 0

    @property
    def position(self) -> Position:
        return self.mark.lane, self.sort_key


class HandlerOrder:
    """The order of the handlers of all events of a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._orders: dict[type[Event], EventOrder] = {}

    def add(self, handlers: Iterable[tuple[type[Event], Handler]]) -> None:
        """Order a plugin's handlers.

        Raises:
            ValueError: there is a cycle; nothing was changed.
        """
        with ExitStack() as undo:
            for event, handler in handlers:
                order = self._orders.setdefault(event, EventOrder(event.__name__))
                self._move(event, order.add(handler))
                undo.callback(self.remove, event, handler)
            undo.pop_all()

    def remove(self, event: type[Event], handler: Handler) -> None:
        self._move(event, self._orders[event].remove(handler))

    def _move(self, event: type[Event], handlers: Iterable[Handler]) -> None:
        self._bus.signal(event).move((handler.method, handler.position) for handler in handlers)


class EventOrder:
    """The handlers of one event, in a stable topological order.

    In each lane, the next handler is the one that was registered first among all that are allowed next. Adding or
    removing a handler moves only the handlers that must run after it.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._listed = 0
        self._lanes: dict[int, list[Handler]] = {}
        self._of_plugin: dict[str, list[Handler]] = {}
        self._before: dict[str, list[Handler]] = {}  # handlers to run before a plugin, by its name
        self._after: dict[str, list[Handler]] = {}

    def add(self, handler: Handler) -> list[Handler]:
        """Add a handler; return it and all handlers with a new sort key.

        Raises:
            ValueError: there is a cycle; nothing was added.
        """
        for table, names in self._indexes(handler):
            for name in names:
                table.setdefault(name, []).append(handler)
        try:
            followers = self._followers(handler)
        except ValueError:
            self._unlist(handler)
            raise
        self._listed = handler.listed = self._listed + 1
        lane = self._lanes.setdefault(handler.mark.lane, [])
        if lane[len(lane) - len(followers) :] == followers:  # no handler has to move
            _insert(handler, lane, len(lane) - len(followers))
            return [handler]
        self._remove_from_lanes(followers)
        _insert(handler, lane, len(lane))
        return [handler, *self._reinsert(followers)]

    def remove(self, handler: Handler) -> list[Handler]:
        """Remove a handler; return all handlers with a new sort key."""
        followers = self._followers(handler)
        self._remove_from_lanes([handler, *followers])
        self._unlist(handler)
        return self._reinsert(followers)

    def _unlist(self, handler: Handler) -> None:
        for table, names in self._indexes(handler):
            for name in names:
                table[name].remove(handler)

    def _indexes(self, handler: Handler) -> Iterator[tuple[dict[str, list[Handler]], Iterable[str]]]:
        yield self._of_plugin, (handler.plugin,)
        yield self._before, handler.mark.names_before
        yield self._after, handler.mark.names_after

    def _successors(self, handler: Handler) -> Iterator[Handler]:
        for name in handler.mark.names_before:
            yield from self._of_plugin.get(name, ())
        yield from self._after.get(handler.plugin, ())

    def _predecessors(self, handler: Handler) -> Iterator[Handler]:
        for name in handler.mark.names_after:
            yield from self._of_plugin.get(name, ())
        yield from self._before.get(handler.plugin, ())

    def _followers(self, handler: Handler) -> list[Handler]:
        """Return all handlers of the lane that must run after a handler, in order.

        Raises:
            ValueError: there is a cycle through the handler.
        """
        for neighbor in self._predecessors(handler):
            if neighbor.mark.lane > handler.mark.lane:
                raise self._cycle([neighbor, handler, neighbor])
        predecessors: dict[Handler, Handler] = {}
        ends = [handler]
        while ends:
            here = ends.pop()
            for neighbor in self._successors(here):
                if neighbor is handler or neighbor.mark.lane < here.mark.lane:
                    way = [neighbor, *_path_back(here, predecessors)][::-1]
                    raise self._cycle(way if neighbor is handler else [*way, handler])
                if neighbor.mark.lane == here.mark.lane and neighbor not in predecessors:
                    predecessors[neighbor] = here
                    ends.append(neighbor)
        return sorted(predecessors, key=SORT_KEY)

    def _remove_from_lanes(self, handlers: Iterable[Handler]) -> None:
        for handler in handlers:
            lane = self._lanes[handler.mark.lane]
            del lane[bisect_left(lane, handler.sort_key, key=SORT_KEY)]

    def _reinsert(self, handlers: list[Handler]) -> list[Handler]:
        """Insert sorted handlers, each before the first that was registered after it.

        Returns the handlers with a new sort key.
        """
        moved = []
        for handler in handlers:
            lane = self._lanes[handler.mark.lane]
            before = [
                previous.sort_key for previous in self._predecessors(handler) if previous.mark.lane == handler.mark.lane
            ]
            position = bisect_right(lane, max(before), key=SORT_KEY) if before else 0
            while position < len(lane) and lane[position].listed < handler.listed:
                position += 1
            if _insert(handler, lane, position):
                moved.append(handler)
        return moved

    def _cycle(self, handlers: list[Handler]) -> ValueError:
        names = " -> ".join(f"{handler.plugin} ({handler.mark.lane.name})" for handler in handlers)
        return ValueError(
            f"The handlers of {self._event} cannot be ordered: before, after and lanes form a cycle: {names}."
        )


def _insert(handler: Handler, lane: list[Handler], position: int) -> bool:
    """Insert a handler into its lane; return whether its sort key has changed."""
    low: Any = lane[position - 1].sort_key if position else -inf
    high: Any = lane[position].sort_key if position < len(lane) else inf
    lane.insert(position, handler)
    if low < handler.sort_key < high:
        return False
    if high == inf:
        handler.sort_key = floor(low) + 1
    else:
        handler.sort_key = ceil(high) - 1 if low == -inf else Fraction(low + high) / 2
    return True


def _path_back(handler: Handler, predecessors: dict[Handler, Handler]) -> Iterator[Handler]:
    yield handler
    while handler in predecessors:
        handler = predecessors[handler]
        yield handler
