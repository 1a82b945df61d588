"""The time of each phase of a batch, and of each plugin's handlers."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from ..events import Event, Lane, Receiver, Run
from ..events import catalogue as ev
from ..events.checks import check_flag
from ..plugins import Plugin, on

PHASES = ("load", "forward", "backward", "step", "wait")


class PhaseTimes(Plugin):
    """Log the time of each phase of a batch, as seconds per batch since the last log.

    - `train/load_seconds`: until the loader has returned the batch and it is on the device;
    - `train/forward_seconds`: in the task's `training_step`, or in your own loop until `run.step(loss)`;
    - `train/backward_seconds`: in the backward pass, with several ranks including the exchange of gradients;
    - `train/step_seconds`: in the optimizer's step;
    - `train/wait_seconds`: with several ranks, in votes and other collectives outside of the backward pass.

    Logs, validations, saves and earlier handlers are not included; later handlers, and handlers of `ShouldStop`, are
    part of the next phase. Use `HandlerTimes` to measure handlers. With several ranks, the times are those of the main
    rank. Without `synchronize`, times on a GPU measure the process, which runs ahead of the device.

    Args:
        synchronize: wait for the device at the end of each phase, so that its work is included. This slows the training
            down.
    """

    policy = "observer"
    draws = False
    ranks = "main"
    affects_training = False
    exclusive = ("phase_times",)

    def __init__(self, *, synchronize: bool = False) -> None:
        check_flag("synchronize", synchronize)
        self.synchronize = synchronize
        self.reset()

    def reset(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._batches, self._is_logged = 0, False
        self._waited: float | None = None
        self._mark: float | None = None  # start of the current phase

    @on(ev.EpochStart, lane=Lane.REPORT)
    def begin(self, run: Run, event: ev.EpochStart) -> None:
        """Start the clock of the first batch."""
        self._mark = perf_counter()
        if self._waited is None:
            self._waited = run.engine.waited_seconds

    @on(ev.BatchStart, ev.ForwardEnd, ev.BackwardEnd, ev.BatchEnd, lane=Lane.REPORT)
    def begin_phase(self, run: Run, event: ev.BatchStart | ev.ForwardEnd | ev.BackwardEnd | ev.BatchEnd) -> None:
        """Start the clock of the next phase after the last handler."""
        self._mark = perf_counter()

    @on(ev.GradientsReady, ev.StepEnd, ev.Log, ev.ValidationEnd, ev.SavePoint, lane=Lane.REPORT, optional=True)
    def begin_rarer_phase(self, run: Run, event: Event) -> None:
        """Start the clock of the step or of the phase after it; restart it after the work of a boundary."""
        self._mark = perf_counter()

    @on(ev.BatchStart, lane=Lane.TRANSFORM)
    def end_load(self, run: Run, event: ev.BatchStart) -> None:
        """Stop the clock of the loader."""
        self._add(run, "load")
        self._batches += 1

    @on(ev.ForwardEnd, lane=Lane.TRANSFORM)
    def end_forward(self, run: Run, event: ev.ForwardEnd) -> None:
        """Stop the clock of the forward pass."""
        self._add(run, "forward")

    @on(ev.BackwardEnd, lane=Lane.TRANSFORM)
    def end_backward(self, run: Run, event: ev.BackwardEnd) -> None:
        """Stop the clock of the backward pass."""
        self._add(run, "backward")

    @on(ev.StepEnd, lane=Lane.TRANSFORM, optional=True)
    def end_step(self, run: Run, event: ev.StepEnd) -> None:
        """Stop the clock of the optimizer."""
        self._add(run, "step")

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def measure(self, run: Run, event: ev.Log) -> None:
        """Add the seconds per batch to the log and restart at zero."""
        if run.report.is_replay or not self._batches:
            return
        waited = run.engine.waited_seconds
        self._seconds["wait"] = waited - (self._waited or 0.0)
        for phase, seconds in self._seconds.items():
            if phase != "wait" or run.engine.world_size > 1:
                event.metrics[f"train/{phase}_seconds"] = seconds / self._batches
        self.reset()
        self._waited, self._is_logged = waited, True

    @on(ev.RunClosed)
    def check_logged(self, run: Run, event: ev.RunClosed) -> None:
        """Warn if times were never logged."""
        if event.status in ("completed", "stopped") and self._batches and not self._is_logged:
            run.warn("PhaseTimes has no times, because nothing was logged: add for example LogSchedule(steps=10).")

    def _add(self, run: Run, phase: str) -> None:
        if self.synchronize and run.engine.device.type != "cpu":
            torch.accelerator.synchronize(run.engine.device)
        if self._mark is not None:
            self._seconds[phase] += perf_counter() - self._mark


class HandlerTimes(Plugin):
    """Measure the time in each plugin's handlers, for `result.plugin_seconds`.

    This costs two readings of the clock per handler call.
    """

    policy = "observer"
    draws = False
    exclusive = ("handler_times",)

    def __init__(self) -> None:
        self._take_off: Callable[[], None] | None = None

    @on(ev.TrainStart, ev.EpochStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart | ev.EpochStart) -> None:
        """Start the measurement."""
        self._begin(run)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
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
