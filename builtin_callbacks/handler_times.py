"""Measure the time that each plugin takes."""

from __future__ import annotations

from ..events import Bus, Lane, Run, TrainStart
from ..plugins import Plugin, on


class HandlerTimes(Plugin):
    """Sum the seconds in each plugin's handlers into `result.plugin_seconds`.

    Costs two clock readings per handler call, and only while a run with this plugin goes on.
    """

    policy = "observer"
    exclusive = ("handler_times",)

    def __init__(self) -> None:
        self._bus: Bus | None = None

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Start the clocks."""
        self._bus = run.bus
        run.plugin_seconds = run.bus.time_handlers()

    def close(self) -> None:
        """Stop the clocks."""
        if self._bus is not None:
            self._bus.stop_timing()
            self._bus = None
