"""Requests of plugins as flags of a Trainer.

The Trainer clears the flags for a log, an evaluation and a save at `step_begin`, and reads them after `step_end` and
`epoch_end`. Pending requests are therefore raised there until they are served. The Trainer checks the stop flag last.
At the end of the last epoch it reads the flags for the last time, so `LastBoundary` is emitted there.
"""

from __future__ import annotations

from typing import Literal

from transformers import TrainerControl

from ...hosted.training import HostedTraining, Leave

Stage = Literal["log", "validation", "save"]
STAGES: tuple[Stage, ...] = ("log", "validation", "save")  # in the order in which the Trainer does them
FLAGS: dict[str, str] = {"log": "should_log", "validation": "should_evaluate", "save": "should_save"}


class FlagRequests:
    """The current boundary: opened at the end of a step or an epoch, closed when all requests are served."""

    def __init__(self, training: HostedTraining) -> None:
        self._training = training
        self._left: set[Stage] = set()  # requested stages that the Trainer has not done yet
        self._ahead: tuple[Stage, ...] = ()  # stages that it can still do at this boundary
        self._step = self._logged = 0
        self._ends_epoch = False

    def begin(self, step: int, leave: Leave, control: TrainerControl) -> None:
        self._left, self._step, self._logged, self._ends_epoch = set(), step, step, False
        self._leave(leave, control)
        if leave.stop:
            run = self._training.active
            run.note(f"{run.host.name} checks for a stop only after a batch, so it trains one batch before it stops")

    def open(self, control: TrainerControl, step: int) -> None:
        self._step, self._ends_epoch = step, False
        self._raise(control, STAGES)

    def end_epoch(self, control: TrainerControl, *, has_ended: bool) -> None:
        self._ends_epoch, self._ahead = True, STAGES
        if has_ended:
            self._raise(control, STAGES)
        else:
            self._end_if_over(control)

    def serve(self, stage: Stage, control: TrainerControl) -> None:
        if stage == "log":
            self._logged = self._step
        self._raise(control, STAGES[STAGES.index(stage) + 1 :])

    def finish(self, control: TrainerControl) -> None:
        if self._left:
            self._left = set()
            self._close_if_done(control)

    def stop_by_host(self, control: TrainerControl) -> None:
        asked = control.should_training_stop
        self._training.stop_by_host(
            "a callback has set should_training_stop" if asked else "it ended the training early"
        )

    def _raise(self, control: TrainerControl, ahead: tuple[Stage, ...]) -> None:
        due = self._training.open_boundary()
        if "log" in due and "log" in ahead and self._step <= self._logged:  # the Trainer logs once at a step
            self._training.log({})
            due -= {"log"}
        for stage in ahead:
            if stage in due:
                setattr(control, FLAGS[stage], True)
        self._left = {stage for stage in ahead if getattr(control, FLAGS[stage])}
        if self._step <= self._logged:
            self._left.discard("log")
        self._ahead = ahead
        self._close_if_done(control)

    def _close_if_done(self, control: TrainerControl) -> None:
        if not (self._left or self._training.active.report.finished):
            self._leave(self._training.close_boundary(), control)
            self._end_if_over(control)

    def _end_if_over(self, control: TrainerControl) -> None:
        if self._ends_epoch and (control.should_training_stop or self._training.active.is_complete):
            self.stop_by_host(control)
            self._training.finish()
            self._raise(control, self._ahead)

    @staticmethod
    def _leave(leave: Leave, control: TrainerControl) -> None:
        control.should_training_stop |= leave.stop
        control.should_epoch_stop |= leave.end_epoch
