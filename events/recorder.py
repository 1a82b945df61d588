"""A subscriber that records emitted events."""

from __future__ import annotations

from collections.abc import Iterable

from . import CATALOGUE, Bus, Event, Lane, Run


class EventRecorder:
    """Records the events of a bus, in order.

    Args:
        bus: the bus to subscribe to.
        events: the event classes to record; by default the whole catalogue.
        lane: the lane of the handlers; `REPORT` runs after all others.

    Attributes:
        trace: the names of the events.
        events: the events.
    """

    def __init__(self, bus: Bus, events: Iterable[type[Event]] = CATALOGUE, *, lane: Lane = Lane.REPORT) -> None:
        self.trace: list[str] = []
        self.events: list[Event] = []
        self._handles = [bus.on(event, self._record, lane=lane) for event in events]

    def _record(self, run: Run, event: Event) -> None:
        self.trace.append(event.name)
        self.events.append(event)

    def stop(self) -> None:
        """Unsubscribe from the bus."""
        for handle in self._handles:
            handle.remove()
