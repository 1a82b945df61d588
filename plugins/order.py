"""The order of the handlers of one event: by lane, then as listed, then as `before` and `after` demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Any

from .marks import Subscription


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound method of a plugin and what its mark says."""

    plugin: str
    method: Callable[..., Any]
    subscription: Subscription


def resolve(handlers: Sequence[Handler], event: str) -> list[Handler]:
    """Return the handlers of one event in the order in which they run; stable where nothing demands otherwise.

    Raises:
        ValueError: the demands form a cycle, or contradict the lanes.
    """
    lanes = {handler.subscription.lane for handler in handlers}
    ordered: list[Handler] = []
    for lane in sorted(lanes):
        ordered += _resolve_lane([handler for handler in handlers if handler.subscription.lane == lane], event)
    _check_lanes(ordered, event)
    return ordered


def _resolve_lane(handlers: Sequence[Handler], event: str) -> list[Handler]:
    graph: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(handlers)), ()))
    for index, handler in enumerate(handlers):
        for other, neighbour in enumerate(handlers):
            if neighbour.plugin in handler.subscription.after:
                graph.add(index, other)
            if neighbour.plugin in handler.subscription.before:
                graph.add(other, index)
    try:
        graph.prepare()
    except CycleError as error:
        names = " -> ".join(handlers[index].plugin for index in error.args[1])
        raise ValueError(
            f"The handlers of {event} cannot be ordered, their before/after form a cycle: {names}."
        ) from None
    ordered: list[Handler] = []
    ready: list[int] = []
    while graph.is_active():
        for index in graph.get_ready():
            heappush(ready, index)
        earliest = heappop(ready)
        ordered.append(handlers[earliest])
        graph.done(earliest)
    return ordered


def _check_lanes(ordered: Sequence[Handler], event: str) -> None:
    """Refuse a `before` or `after` that the lanes have already decided the other way."""
    for place, handler in enumerate(ordered):
        late = {earlier.plugin for earlier in ordered[:place]} & handler.subscription.before - {handler.plugin}
        soon = {later.plugin for later in ordered[place + 1 :]} & handler.subscription.after - {handler.plugin}
        for word, names in (("before", late), ("after", soon)):
            if names:
                raise ValueError(
                    f"{handler.plugin} asks to hear {event} {word} {', '.join(sorted(names))}, but its lane "
                    f"{handler.subscription.lane.name} says otherwise: change the lane of one of them."
                )
