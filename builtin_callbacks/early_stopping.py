"""Stop when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Literal

from ..core.host import ended_for_good
from ..core.metrics.monitor import Monitor
from ..events import CheckpointLoaded, LateResult, Log, Run, RunClosed, TrainStart, ValidationEnd
from ..events.checks import check_whole_number, count
from ..plugins import Plugin, on


class EarlyStopping(Plugin):
    """Stop when a metric has stopped improving.

    The plugin requests a stop if the metric has not improved in `patience` consecutive checks. The best value changes
    only if the improvement exceeds `min_delta`, so small improvements add up. If the stop is vetoed and the metric
    improves, the plugin withdraws it. The metric is read after each validation, at each log if it is a `train/` metric,
    or when `LateResults` of heliograph-recorder reads it if it is a `late/` metric.

    Args:
        monitor: the name of the metric, such as `validation/loss`.
        patience: the number of consecutive checks without an improvement.
        mode: whether smaller (`min`) or larger (`max`) values are better; optional for a loss or an error.
        min_delta: an improvement must be larger than this, in the units of the metric.
        nan: how to treat a NaN: `worse` (no improvement), `stop` (stop immediately) or `raise`.

    Raises:
        ValueError: an argument is out of range. At the start of a run, if the metric will never be measured. At the
            first measurement, if it does not exist; the error lists the existing metrics. Later, if it is NaN and
            `nan="raise"`.
    """

    asks = ("stop",)

    def __init__(
        self,
        monitor: str = "validation/loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
        nan: Literal["worse", "stop", "raise"] = "worse",
    ) -> None:
        self.patience = check_whole_number("patience", patience, at_least=1)
        if nan not in ("worse", "stop", "raise"):
            raise ValueError(f"nan is 'worse', 'stop' or 'raise', got {nan!r}.")
        self.monitor = Monitor(monitor, mode, min_delta, late=True)
        self.ignores = self.monitor.ignores
        self.needs = ({"train": "log", "late": "save"}.get(self.monitor.split, "validation"),)
        self.nan = nan
        self.best: float | None = None
        self.failed_readings = 0
        self._stopped_by_nan = False
        self._judged = self._judges  # the metric of `best`

    @property
    def _judges(self) -> str:
        return f"{self.monitor.name} ({self.monitor.mode})"

    def reset(self) -> None:
        self.best, self.failed_readings, self._stopped_by_nan = None, 0, False
        self._judged = self._judges

    def describe(self, run: Run) -> str:
        way = "smaller" if self.monitor.mode == "min" else "larger"
        return f"stops when {self.monitor.name} has not become {way} in {count(self.patience, 'check', 'checks')}"

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Check that the metric will be measured."""
        self.monitor.check_measured(run)

    @on(CheckpointLoaded)
    def repeat_stop_after_resume(self, run: Run, event: CheckpointLoaded) -> None:
        """Stop a resumed run again, unless `patience` was raised or the metric has changed."""
        if self._judged != self._judges:
            run.note(f"{self.name} starts again: it monitored {self._judged} before and monitors {self._judges} now")
            self.reset()
        if self._stopped_by_nan and self.nan == "stop":
            run.control.stop(f"{self.monitor.name} was NaN")
        elif self.failed_readings >= self.patience:
            self._stop(run)
        elif (stop := run.control.stop_request) is not None and stop.by == self.name:
            run.control.withdraw("stop", f"{self.monitor.name} did not fail {self.patience} times in a row")

    @on(ValidationEnd, Log, LateResult, optional=True)
    def read(self, run: Run, event: ValidationEnd | Log | LateResult) -> None:
        """Check the metric after a validation, at a log of a training, or when a late result was read."""
        if self.monitor.is_for(run, event):
            self._judge(run, event.metrics)

    @on(RunClosed)
    def end(self, run: Run, event: RunClosed) -> None:
        """Warn if the metric was never measured."""
        if ended_for_good(run, event.status) and run.optimizer is not None:
            self.monitor.warn_unread(run, type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        count = {"best": self.best, "failed_readings": self.failed_readings, "stopped_by_nan": self._stopped_by_nan}
        return {**count, "judges": self._judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.failed_readings = state["best"], state["failed_readings"]
        self._stopped_by_nan = state["stopped_by_nan"]
        self._judged = state["judges"]

    def _judge(self, run: Run, metrics: Mapping[str, float]) -> None:
        value = self.monitor.read(metrics)
        if math.isnan(value) and self.nan == "raise":
            raise ValueError(f"{self.monitor.name} is NaN at step {run.progress.steps}.")
        if math.isnan(value) and self.nan == "stop":
            self._stopped_by_nan = True
            run.control.stop(f"{self.monitor.name} is NaN")
            return
        if self.monitor.improves(value, self.best):
            self.best, self.failed_readings, self._stopped_by_nan = value, 0, False
            self._withdraw(run)
            return
        self.failed_readings += 1
        if self.failed_readings >= self.patience:
            self._stop(run)

    def _withdraw(self, run: Run) -> None:
        control = run.control
        if control.stop_request is None or control.stop_request.by != self.name:
            return
        latest = takewhile(lambda request: request.verb != "withdraw_stop", reversed(control.history))
        other_stops = [request for request in latest if request.verb == "stop" and request.by != self.name]
        if control.withdraw("stop", f"{self.monitor.name} improved to {self.best:.6g}"):
            for request in reversed(other_stops):
                control.stop(request.reason, by=request.by)

    def _stop(self, run: Run) -> None:
        state = "was not a number" if self.best is None else f"has not improved on {self.best:.6g}"
        run.control.stop(f"{self.monitor.name} {state} in {count(self.failed_readings, 'check', 'checks')}")
