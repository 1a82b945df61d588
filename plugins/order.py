"""The order of the handlers of one event: by lane, then as listed, then as `before` and `after` demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Any

from .marks import Marker


@dataclass(frozen=True, slots=True)
class Handler:
    """A bound method of a plugin and what its mark says."""

    plugin: str
    method: Callable[..., Any]
    mark: Marker[Any]


def resolve(handlers: Sequence[Handler], event: str) -> list[Handler]:
    """Return the handlers of one event in the order in which they run; stable where nothing demands otherwise.

    Raises:
        ValueError: the demands, those of the lanes among them, form a cycle.
    """
    listed = sorted(handlers, key=lambda handler: handler.mark.lane)
    graph: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(listed)), ()))
    for index, handler in enumerate(listed):
        for other, neighbour in enumerate(listed):
            if handler.mark.lane > neighbour.mark.lane or handler.mark.asks_after(neighbour.plugin):
                graph.add(index, other)
            if handler.mark.asks_before(neighbour.plugin):
                graph.add(other, index)
    try:
        graph.prepare()
    except CycleError as error:
        names = " -> ".join(f"{listed[index].plugin} ({listed[index].mark.lane.name})" for index in error.args[1])
        raise ValueError(
            f"The handlers of {event} cannot be ordered, before/after and lanes form a cycle: {names}."
        ) from None
    ordered: list[Handler] = []
    ready: list[int] = []
    while graph.is_active():
        for index in graph.get_ready():
            heappush(ready, index)
        earliest = heappop(ready)
        ordered.append(listed[earliest])
        graph.done(earliest)
    return ordered
