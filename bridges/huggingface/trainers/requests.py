"""What our plugins ask for, as the flags of a Trainer.

The Trainer clears the flags for a log, an evaluation and a save at `step_begin`, and reads them after `step_end`: so
what is due is raised there, again and again until it was served. It looks at the stop after all of these.
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
        self._left: set[Stage] = set()
        self._logged = 0

    def begin(self, step: int, leave: Leave, control: TrainerControl) -> None:
        """Begin a training at a step; a stop that is asked for at once takes effect after the first batch."""
        self._left, self._logged = set(), step
        self._leave(leave, control)
        if leave.stop:
            run = self._training.active
            run.note(f"{run.host.name} looks at a stop after a batch only, and so trains one before it stops")

    def open(self, control: TrainerControl, step: int) -> None:
        """Raise the flags of what is due, at the end of a step or an epoch."""
        due = self._training.open_boundary()
        if "log" in due and step <= self._logged:  # the Trainer logs once at a step
            self._training.log({})
            due -= {"log"}
        self._raise(control, due, STAGES)
        self._left = {stage for stage in STAGES if getattr(control, FLAGS[stage])}
        if step <= self._logged:
            self._left.discard("log")
        self._close_if_done(control)

    def serve(self, stage: Stage, control: TrainerControl, step: int) -> None:
        """Note that the Trainer has done something, and raise the flags of what that made due and comes after it."""
        if stage == "log":
            self._logged = step
        later = STAGES[STAGES.index(stage) + 1 :]
        self._raise(control, self._training.open_boundary(), later)
        self._left = {each for each in later if getattr(control, FLAGS[each])}
        self._close_if_done(control)

    def finish(self, control: TrainerControl) -> None:
        """Close a boundary at which the Trainer did less than was expected, as another callback took flags back."""
        if self._left:
            self._left = set()
            self._close_if_done(control)

    def _close_if_done(self, control: TrainerControl) -> None:
        if not self._left:
            self._leave(self._training.close_boundary(), control)

    @staticmethod
    def _raise(control: TrainerControl, due: frozenset[str], stages: tuple[Stage, ...]) -> None:
        for stage in stages:
            if stage in due:
                setattr(control, FLAGS[stage], True)

    @staticmethod
    def _leave(leave: Leave, control: TrainerControl) -> None:
        control.should_training_stop |= leave.stop
        control.should_epoch_stop |= leave.end_epoch
