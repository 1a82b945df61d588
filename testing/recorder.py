"""A subscriber that writes down what was emitted."""

from __future__ import annotations

from collections.abc import Iterable

from heliograph.events import CATALOGUE, Bus, Event, Lane, Run


class Recorder:
    """Records the name of every event on a bus, in order, as `trace`.

    Args:
        bus: where to listen.
        events: which events; by default the whole catalogue.
        lane: the lane to listen in; `REPORT` hears what the others have done.
    """

    def __init__(self, bus: Bus, events: Iterable[type[Event]] = CATALOGUE, *, lane: Lane = Lane.REPORT) -> None:
        self.trace: list[str] = []
        self.events: list[Event] = []
        self._handles = [bus.on(event, self._hear, lane=lane) for event in events]

    def _hear(self, run: Run, event: Event) -> None:
        self.trace.append(event.name)
        self.events.append(event)

    def stop(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
