"""A subscriber that records the emitted events."""

from __future__ import annotations

from collections.abc import Iterable

from . import CATALOGUE, Bus, Event, Lane, Run


class EventRecorder:
    """Records the name of every event on a bus, in order, as `trace`.

    Args:
        bus: to subscribe to.
        events: which events; by default the whole catalogue.
        lane: of the handlers; those in `REPORT` run after all others.
    """

    def __init__(self, bus: Bus, events: Iterable[type[Event]] = CATALOGUE, *, lane: Lane = Lane.REPORT) -> None:
        self.trace: list[str] = []
        self.events: list[Event] = []
        self._handles = [bus.on(event, self._record, lane=lane) for event in events]

    def _record(self, run: Run, event: Event) -> None:
        self.trace.append(event.name)
        self.events.append(event)

    def stop(self) -> None:
        """Unsubscribe."""
        for handle in self._handles:
            handle.remove()
