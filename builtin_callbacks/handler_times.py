"""Measure the time that each plugin takes."""

from __future__ import annotations

from time import perf_counter

from ..events import Bus, EpochStart, Event, Lane, Run, TrainStart
from ..events.bus import Receiver
from ..plugins import Plugin, on


class HandlerTimes(Plugin):
    """Sum the seconds in each plugin's handlers into `result.plugin_seconds`.

    Costs two clock readings per handler call, and only while a run with this plugin goes on.
    """

    policy = "observer"
    exclusive = ("handler_times",)

    def __init__(self) -> None:
        self._bus: Bus | None = None

    @on(TrainStart, EpochStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart | EpochStart) -> None:
        """Start the clocks, unless they go."""
        if self._bus is not None:
            return
        self._bus, seconds = run.bus, run.plugin_seconds

        def clocked(handler: Receiver, owner: str) -> Receiver:
            seconds.setdefault(owner, 0.0)

            def timed(run: Run, *, event: Event) -> None:
                begin = perf_counter()
                try:
                    handler(run, event=event)
                finally:
                    seconds[owner] += perf_counter() - begin

            return timed

        run.bus.wrap_all(clocked)

    def close(self) -> None:
        """Take the clocks off."""
        if self._bus is not None:
            self._bus.wrap_all(None)
            self._bus = None
