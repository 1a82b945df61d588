"""Monitored metrics: the name, and whether smaller or larger is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ...events import Event, LateResult, Log, ValidationBatchEnd, ValidationBatchStart, ValidationEnd, ValidationStart
from ...events.checks import check_number, known_names
from ...plugins.first_party import PACKAGES

if TYPE_CHECKING:
    from ...events import Run

# Plugins in these modules add no metrics; bridges host callbacks that may.
BUILT_INS = (
    "heliograph.builtin_callbacks.",
    *(f"heliograph_{name}." for name in PACKAGES if name not in ("bridges", "testing")),
)
MEASURING: Mapping[str, type[Event]] = {"train": Log, "validation": ValidationEnd, "late": LateResult}
VALIDATING = (ValidationStart, ValidationBatchStart, ValidationBatchEnd, ValidationEnd)


class Monitor:
    """A metric's name and its direction.

    Args:
        name: such as `validation/loss`.
        mode: `min` or `max`; None means `min` for a name that ends in `loss` or `error`.
        min_delta: improvements up to this, in the metric's units, are ignored.
        late: whether the metric may be of a `LateResult`, such as `late/accuracy`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, name: str, mode: Literal["min", "max"] | None, min_delta: float = 0.0, *, late: bool = False
    ) -> None:
        check_number("min_delta", min_delta, at_least=0)
        if not str(name).startswith(("train/", "validation/", *("late/",) * late)):
            raise ValueError(f"A monitored metric is <split>/<name>, as in {_suggested_name(name)!r}, got {name!r}.")
        mode = "min" if mode is None and name.endswith(("loss", "error")) else mode
        if mode not in ("min", "max"):
            raise ValueError(f"The direction of {name!r} is unknown: give mode='min' or 'max', got {mode!r}.")
        self.name, self.mode, self.min_delta = name, mode, min_delta
        self.split = name.split("/")[0]
        self._readings = self._misses = 0

    def can_come(self, run: Run) -> bool:
        """True unless it is a validation metric and there is no validation data."""
        return self.split != "validation" or bool(run.data.validation_sets)

    def check_measured(self, run: Run) -> None:
        """Reset the counters at `TrainStart`, and check that the metric can be measured.

        A metric of a validation cannot be measured if there is no validation data, if the sets have other names, or if
        the task lists its metrics (`validation_names`) without it. Metrics from plugins of other packages are
        possible if such a plugin handles events of the validation; then nothing is checked.

        Raises:
            ValueError: the metric will not be measured.
        """
        self._readings = self._misses = 0
        if self.split != "validation":
            return
        if not self.can_come(run):
            raise ValueError(f"{self.name!r} is monitored, but there is no validation data: pass validation= to fit.")
        if run.report.is_replay or others_take_part(run):
            return
        names = getattr(run.task, "validation_names", None)
        measured = names() if callable(names) else None
        prefixes = [f"validation/{dataset}/" if dataset else "validation/" for dataset in run.data.validation_sets]
        possible = [prefix + name for prefix in prefixes for name in measured or ("<name>",)]
        below = prefixes if measured is None else [f"{name}/" for name in possible]  # of a metric with several values
        if self.name in possible or self.name.startswith(tuple(below)):
            return
        raise ValueError(f"There will be no metric {self.name!r}.{known_names(self.name, possible)}")

    @property
    def ignores(self) -> tuple[type[Event], ...]:
        """The events that never measure this metric.

        Without a handler of `Log`, nothing is averaged.
        """
        return tuple(event for split, event in MEASURING.items() if split != self.split)

    def is_for(self, run: Run, event: Log | ValidationEnd | LateResult) -> bool:
        """True if an event of a training measured this metric.

        A log without a training loss does not belong to a batch. A metric may be missing if it was measured before, if
        it is the loss of one of several optimizers, or if it is of a set that this validation did not read.

        Raises:
            ValueError: it was never measured, or is not a number; the message lists the existing metrics.
        """
        losses = {f"train/{run.stepping.label('loss', name)}" for name in run.optimizers}
        if not losses or not isinstance(event, MEASURING[self.split]):
            return False
        if isinstance(event, Log) and losses.isdisjoint(event.metrics):
            return False
        if self.name in event.metrics:
            self._readings += 1
            return True
        if self._is_left_out(run.data.validation_sets, event.metrics):
            return False
        self._misses += 1
        if self.split != "late" and not (self._readings or self.name in run.metrics or self.name in losses):
            self._check_number(run)
            self.read(event.metrics)
        return False

    def _check_number(self, run: Run) -> None:
        name = self.name.removeprefix("validation/")
        if not run.report.is_replay and name in run.collected:
            from .metric_objects import describe_non_number

            raise ValueError(f"{self.name!r} cannot be monitored: {describe_non_number(name, run.collected[name])}.")

    def _is_left_out(self, sets: Iterable[str], metrics: Mapping[str, float]) -> bool:
        prefixes = [f"validation/{name}/" for name in sets if name and self.name.startswith(f"validation/{name}/")]
        return bool(prefixes) and not any(name.startswith(tuple(prefixes)) for name in metrics)

    def warn_unread(self, run: Run, plugin: str) -> None:
        """Warn at `RunClosed` if the metric was not measured in a run that succeeded.

        A resumed run that only completes another run need not measure it again.

        Args:
            run: the run.
            plugin: the plugin that never acted.
        """
        if self._readings or (self.name in run.metrics and not self._misses):
            return
        if self.split == "validation":
            advice = "validate more often, for example with ValidationSchedule(epochs=1)"
        elif self.split == "late":
            advice = "add LateResults(folder), and run `python -m heliograph evaluate --follow` beside the training"
        else:
            advice = "log more often, for example with LogSchedule(steps=10)"
        advice = f"none of {self._misses} measurements had it" if self._misses else advice
        run.warn(f"{plugin} never acted: its monitored metric {self.name!r} was not measured in this run; {advice}.")

    def read(self, metrics: Mapping[str, float]) -> float:
        """Return the metric's value.

        Raises:
            ValueError: there is no such metric; the message lists the existing ones.
        """
        if self.name not in metrics:
            raise ValueError(f"There is no metric {self.name!r}.{known_names(self.name, metrics)}")
        return metrics[self.name]

    def improves(self, value: float, best: float | None) -> bool:
        """True if a value is better than the best so far; never for NaN."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


def _suggested_name(name: object) -> str:
    # The name that other frameworks give it is translated: `val_loss` becomes `validation/loss`.
    match = re.fullmatch(r"(?:(train|training)|validation|valid|val|eval|test)[_/](.+)", str(name))
    train, metric = match.groups() if match else (None, name if isinstance(name, str) and "/" not in name else "")
    return f"{'train' if train else 'validation'}/{metric or 'loss'}"


def others_take_part(run: Run, events: Iterable[type[Event]] = VALIDATING) -> bool:
    # Their handlers of evaluation events may add metrics.
    receivers = (receiver for event in events for receiver, _ in run.bus.signal(event).listeners())
    return any(not (receiver.__module__ or "").startswith(BUILT_INS) for receiver in receivers)
