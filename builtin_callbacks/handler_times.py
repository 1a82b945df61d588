"""The time that each plugin's handlers take."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from ..events import EpochStart, Event, Lane, PredictStart, Run, TestStart, TrainStart, ValidationStart
from ..events.bus import Receiver
from ..plugins import Plugin, on


class HandlerTimes(Plugin):
    """Measure the time in each plugin's handlers, for `result.plugin_seconds`.

    This costs two readings of the clock per handler call.
    """

    policy = "observer"
    draws = False
    exclusive = ("handler_times",)

    def __init__(self) -> None:
        self._take_off: Callable[[], None] | None = None

    @on(TrainStart, EpochStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart | EpochStart) -> None:
        """Start the measurement."""
        self._begin(run)

    @on(ValidationStart, TestStart, PredictStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ValidationStart | TestStart | PredictStart) -> None:
        """Start the measurement in a validation, test or prediction alone."""
        self._begin(run)

    def close(self) -> None:
        if self._take_off is not None:
            self._take_off()
            self._take_off = None

    def _begin(self, run: Run) -> None:
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
