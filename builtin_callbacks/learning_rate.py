"""Step the learning-rate scheduler that `fit` was given."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal

from ..core.metrics.monitor import Monitor
from ..events import EpochEnd, Lane, Log, Run, StepEnd, TrainStart, ValidationEnd
from ..plugins import Plugin, on


class LearningRate(Plugin):
    """Step the learning rate's scheduler.

    The one of `fit(scheduler=...)` is stepped after every optimizer step, after every epoch, or on a plateau of a
    metric. Never stepped where the optimizer was not. Logs `train/learning_rate`, the one that the next step will use.
    Of several optimizers by name each has its own scheduler, or none, and is logged as `train/<name>_learning_rate`.

    Args:
        per: `step`, `epoch` or `plateau`.
        monitor: the metric that a plateau is judged by; only with `plateau`.

    Raises:
        ValueError: `per` is unknown, or a monitor is given without `plateau`; at the run's start, there is no
            scheduler.
    """

    exclusive = ("scheduler",)
    asks = ("scheduler",)

    def __init__(self, per: Literal["step", "epoch", "plateau"], *, monitor: str | None = None) -> None:
        if per not in ("step", "epoch", "plateau"):
            raise ValueError(f"LearningRate(per) is 'step', 'epoch' or 'plateau', got {per!r}.")
        if (monitor is not None) != (per == "plateau"):
            raise ValueError("monitor= goes with LearningRate('plateau', monitor='validation/loss'), and only with it.")
        self.per = per
        self._steps_before = 0
        self._stepped: set[str] = set()
        self.monitor = None if monitor is None else Monitor(monitor, "min")
        if self.monitor is not None:
            self.needs = ("validation" if self.monitor.split == "validation" else "log",)

    def reset(self) -> None:
        """Forget what the former run stepped."""
        self._steps_before, self._stepped = 0, set()

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Check that there is something to step."""
        if not run.schedulers:
            raise ValueError("LearningRate steps a scheduler, but fit was given none: pass scheduler= to fit.")
        for scheduler in run.schedulers.values():
            if ("metrics" in signature(scheduler.step).parameters) != (self.per == "plateau"):
                kind = type(scheduler).__name__
                raise ValueError(
                    f"LearningRate({self.per!r}) does not fit {kind}: only a plateau scheduler takes a metric."
                )
        if self.monitor is not None:
            self.monitor.check_measured(run)

    @on(StepEnd)
    def after_step(self, run: Run, event: StepEnd) -> None:
        """Step per optimizer step; else remember which optimizer was stepped."""
        if self.per != "step":
            self._stepped.add(run.optimizer_name)
        elif run.scheduler is not None:
            run.scheduler.step()

    @on(EpochEnd, optional=True)
    def after_epoch(self, run: Run, event: EpochEnd) -> None:
        """Step per epoch, if the optimizer was stepped in it."""
        if self.per == "epoch":
            with warnings.catch_warnings():
                if run.origin.steps:  # the optimizer's steps may have been taken before the resume: torch cannot know
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                for scheduler in self._due(run):
                    scheduler.step()

    @on(ValidationEnd, Log, optional=True)
    def after_measuring(self, run: Run, event: ValidationEnd | Log) -> None:
        """Step by the metric, where it was measured in a fit."""
        if self.monitor is None or not self.monitor.is_for(event) or run.optimizer is None:
            return
        value = self.monitor.read(event.metrics)  # a NaN is handed on: it compares as no improvement
        for scheduler in self._due(run):
            scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps there were when schedulers were last stepped, and which optimizers had some since."""
        return {"steps_before": self._steps_before, "stepped": sorted(self._stepped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._steps_before, self._stepped = state["steps_before"], set(state["stepped"])

    @on(Log, lane=Lane.MEASURE, optional=True)
    def report(self, run: Run, event: Log) -> None:
        """Add the learning rate of each optimizer's first parameter group to the log."""
        for name, optimizer in run.optimizers.items():
            event.metrics[f"train/{run.label('learning_rate', name)}"] = float(optimizer.param_groups[0]["lr"])

    def _due(self, run: Run) -> list[Any]:
        """Return the schedulers whose optimizers were stepped since they were; start to watch for steps again."""
        if run.progress.steps == self._steps_before:
            return []
        alone = len(run.optimizers) == 1  # stepped whenever there was a step, with or without its event
        due = [each for name, each in run.schedulers.items() if alone or name in self._stepped]
        self._steps_before, self._stepped = run.progress.steps, set()
        return due
