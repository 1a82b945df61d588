"""Log the means of a whole epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..events import EpochEnd, EpochStart, Lane, Log, Run
from ..plugins import Plugin, on


class EpochMeans(Plugin):
    """Log the means of each epoch as `train/epoch/<name>`.

    For example, with `LogSchedule(steps=50)`, `train/loss` is the mean of the last 50 steps, and `train/epoch/loss` the
    mean of all batches of the epoch. The plugin requests a log at the end of each epoch. The means have the same
    weights as logged ones. There is no epoch mean of metric objects, such as those of torchmetrics, because they are
    computed from one log to the next, and none of an epoch whose beginning the plugin has not seen.
    """

    asks = ("log",)
    affects_training = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._is_whole = self._epoch_ended = False

    def describe(self, run: Run) -> str:
        return "logs the means of each epoch at its end"

    @on(EpochStart)
    def begin(self, run: Run, event: EpochStart) -> None:
        """Reset the sums, unless the epoch is resumed."""
        if not event.resumed:
            self.reset()
            self._is_whole = True

    @on(EpochEnd)
    def ask(self, run: Run, event: EpochEnd) -> None:
        """Request the last log of the epoch."""
        if self._is_whole:
            self._epoch_ended = True
            run.control.request_log("the means of the epoch")

    @on(Log, lane=Lane.MEASURE)
    def add(self, run: Run, event: Log) -> None:
        """Add the logged values; at the end of the epoch, add its means to the log."""
        for name, weight in event.weights.items():
            self._sums[name] = self._sums.get(name, 0.0) + event.metrics[name] * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight
        if self._epoch_ended:
            for name, total in self._sums.items():
                scope, _, metric = name.partition("/")
                event.metrics[f"{scope}/epoch/{metric}"] = total / self._weights[name]
            self.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self._sums,
            "weights": self._weights,
            "is_whole": self._is_whole,
            "epoch_ended": self._epoch_ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if state:
            self._sums, self._weights = dict(state["sums"]), dict(state["weights"])
            self._is_whole, self._epoch_ended = state["is_whole"], state["epoch_ended"]
