"""What our plugins ask for, as the flags of a Trainer.

The Trainer clears the flags for a log, an evaluation and a save at `step_begin`, and reads them after `step_end` and
`epoch_end`: so what is due is raised there, again and again until it was served. It looks at the stop after all of
these. At the end of the last epoch it reads the flags for the last time, so `LastBoundary` comes there.
"""

from __future__ import annotations

from typing import Literal

from transformers import TrainerControl

from ...hosted.boundary import Leave
from ...hosted.training import HostedTraining

Stage = Literal["log", "validation", "save"]
STAGES: tuple[Stage, ...] = ("log", "validation", "save")  # in the order in which the Trainer does them
FLAGS: dict[str, str] = {"log": "should_log", "validation": "should_evaluate", "save": "should_save"}


class Requests:
    """The boundary that the Trainer is at: opened at the end of a step or an epoch, closed when all is done there.

    Args:
        training: the plugins.
    """

    def __init__(self, training: HostedTraining) -> None:
        self._training = training
        self._left: set[Stage] = set()  # what the Trainer has still to do here
        self._ahead: tuple[Stage, ...] = ()  # what it can still do here
        self._step = self._logged = 0
        self._ends_epoch = False

    def begin(self, step: int, leave: Leave, control: TrainerControl) -> None:
        """Begin a training at a step; a stop that is asked for at once takes effect after the first batch."""
        self._left, self._step, self._logged, self._ends_epoch = set(), step, step, False
        self._leave(leave, control)
        if leave.stop:
            run = self._training.active
            run.note(f"{run.host.name} looks at a stop after a batch only, and so trains one before it stops")

    def open(self, control: TrainerControl, step: int) -> None:
        """Raise the flags of what is due, at the end of a step."""
        self._step, self._ends_epoch = step, False
        self._raise(control, STAGES)

    def end_epoch(self, control: TrainerControl, *, has_ended: bool) -> None:
        """Raise the flags of what is due at the end of an epoch, which has ended, or was left within."""
        self._ends_epoch, self._ahead = True, STAGES
        if has_ended:
            self._raise(control, STAGES)
        else:
            self._end_if_over(control)

    def serve(self, stage: Stage, control: TrainerControl) -> None:
        """Note that the Trainer has done something, and raise the flags of what that made due and comes after it."""
        if stage == "log":
            self._logged = self._step
        self._raise(control, STAGES[STAGES.index(stage) + 1 :])

    def finish(self, control: TrainerControl) -> None:
        """Close a boundary at which the Trainer did less than was expected, as another callback took flags back."""
        if self._left:
            self._left = set()
            self._close_if_done(control)

    def stop_by_host(self, control: TrainerControl) -> None:
        """Note who has ended the training, where that is before its length and no plugin has asked for it."""
        asked = control.should_training_stop
        self._training.stop_by_host(
            "a callback has set should_training_stop" if asked else "it ended the training before its length"
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
        """Let plugins ask for what is left, where no epoch follows."""
        if self._ends_epoch and (control.should_training_stop or self._training.active.is_complete):
            self.stop_by_host(control)
            self._training.finish()
            self._raise(control, self._ahead)

    @staticmethod
    def _leave(leave: Leave, control: TrainerControl) -> None:
        control.should_training_stop |= leave.stop
        control.should_epoch_stop |= leave.end_epoch
