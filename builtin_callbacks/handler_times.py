"""Measure the time that each plugin takes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from ..events import EpochStart, Event, Lane, PredictStart, Run, TestStart, TrainStart, ValidationStart
from ..events.bus import Receiver
from ..plugins import Plugin, on


class HandlerTimes(Plugin):
    """Measure the time in each plugin's handlers.

    The sums are in `result.plugin_seconds`. Costs two readings of the clock per handler call, and only during a run
    with this plugin.
    """

    policy = "observer"
    draws = False
    exclusive = ("handler_times",)

    def __init__(self) -> None:
        self._take_off: Callable[[], None] | None = None

    @on(TrainStart, EpochStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart | EpochStart) -> None:
        """Start the clocks."""
        self._begin(run)

    @on(ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ValidationStart | TestStart | PredictStart) -> None:
        """Start them in a run that consists of nothing else."""
        self._begin(run)

    def close(self) -> None:
        """Take the clocks off."""
        if self._take_off is not None:
            self._take_off()
            self._take_off = None

    def _begin(self, run: Run) -> None:
        """Start the clocks, unless they go."""
        if self._take_off is not None:
            return
        seconds = run.report.plugin_seconds

        def clocked(handler: Receiver, owner: str) -> Receiver:
            seconds.setdefault(owner, 0.0)

            def timed(run: Run, *, event: Event) -> None:
                begin = perf_counter()
                try:
                    handler(run, event=event)
                finally:
                    seconds[owner] += perf_counter() - begin

            return timed

        self._take_off = run.bus.intercept(clocked)
