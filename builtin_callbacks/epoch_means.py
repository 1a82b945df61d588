"""Log the means of a whole epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..events import EpochEnd, EpochStart, Lane, Log, Run
from ..plugins import Plugin, on


class EpochMeans(Plugin):
    """Log the means of each epoch as `train/epoch/<name>`, beside those since the last log.

    With `LogSchedule(steps=50)` and this plugin there is `train/loss`, of the last 50 steps, and at the end of each
    epoch `train/epoch/loss`, of all its batches. The end of an epoch is logged for it. The means are weighted as those
    that are logged. A metric object, such as those of torchmetrics, computes its value from one log to the next: of it
    there is no mean. Nor is there one of an epoch of which this plugin has not seen the beginning.
    """

    asks = ("log",)
    affects_training = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with no values."""
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._is_whole = self._epoch_ended = False

    def describe(self, run: Run) -> str:
        """Say when it logs."""
        return "logs the means of each epoch at its end"

    @on(EpochStart)
    def begin(self, run: Run, event: EpochStart) -> None:
        """Begin with no values, unless the epoch is resumed."""
        if not event.resumed:
            self.reset()
            self._is_whole = True

    @on(EpochEnd)
    def ask(self, run: Run, event: EpochEnd) -> None:
        """Ask for the log that has the rest of the epoch."""
        if self._is_whole:
            self._epoch_ended = True
            run.control.request_log("the means of the epoch")

    @on(Log, lane=Lane.MEASURE)
    def add(self, run: Run, event: Log) -> None:
        """Add what was logged; at the end of the epoch, add its means to the log."""
        for name, weight in event.weights.items():
            self._sums[name] = self._sums.get(name, 0.0) + event.metrics[name] * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight
        if self._epoch_ended:
            for name, total in self._sums.items():
                scope, _, own = name.partition("/")
                event.metrics[f"{scope}/epoch/{own}"] = total / self._weights[name]
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        return {
            "sums": self._sums,
            "weights": self._weights,
            "is_whole": self._is_whole,
            "epoch_ended": self._epoch_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue adding."""
        self.reset()
        if state:
            self._sums, self._weights = dict(state["sums"]), dict(state["weights"])
            self._is_whole, self._epoch_ended = state["is_whole"], state["epoch_ended"]
