"""The plugin that calls the hooks of a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import Lane, Run, on
from heliograph import events as ev

from ..unsaved import Unsaved
from .evaluations import EvaluationHooks
from .flavour import Flavour
from .hooks import has
from .refused import is_shipped
from .states import give_back, saved_state
from .work import Work


class LightningCallback(EvaluationHooks):
    """A callback of Lightning as a plugin; `from_lightning` makes it.

    Args:
        callback: the callback.
        flavour: the package that it is of.
    """

    def __init__(self, callback: Any, flavour: Flavour) -> None:
        super().__init__(callback, flavour)
        self._has_begun = self._stops = False
        self._unsaved: Unsaved | None = None
        self._ends_epochs = has(callback, flavour, "on_train_epoch_end")
        self._restarts_epoch = is_shipped(callback, flavour, "StochasticWeightAveraging")

    def open(self, run: Run) -> Work:
        """Set the callback up, and give it the state that waits for it."""
        work = super().open(run)
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self.load_state_dict(waiting)
        return work

    @on(ev.TrainStart, lane=Lane.REPORT)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Call `setup`; unless a checkpoint is loaded next, `on_fit_start` and `on_train_start`."""
        self.open(run)
        self._has_begun = self._stops = self._is_epoch_end_due = False
        if not run.checkpoints.is_resuming:
            self._begin_training(self._work_of(run))

    @on(ev.CheckpointLoaded)
    def continue_training(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Call `on_fit_start` and `on_train_start` where that is still to be done; ask again for a stop."""
        work = self._work_of(run)
        work.between_epochs = self._is_epoch_end_due = False
        work.metrics.forget()
        if not self._has_begun:
            self._begin_training(work)
        if self._stops:
            run.control.stop("the callback had set trainer.should_stop before the checkpoint was saved")

    @on(ev.EpochStart)
    def begin_epoch(self, run: Run, event: ev.EpochStart) -> None:
        """Call `on_train_epoch_start`, once for each epoch."""
        work = self._work_of(run)
        work.between_epochs = False
        self._watch_boundaries(run, watches=False)
        if self._restarts_epoch or not event.resumed:
            self._callback.on_train_epoch_start(work.trainer, work.module)

    @on(ev.BatchStart, optional=True)
    def begin_batch(self, run: Run, event: ev.BatchStart) -> None:
        """Call `on_train_batch_start`."""
        work = self._work_of(run)
        work.batch_index = run.progress.batch
        self._callback.on_train_batch_start(work.trainer, work.module, run.batch, work.batch_index)

    @on(ev.ForwardEnd, optional=True)
    def before_backward(self, run: Run, event: ev.ForwardEnd) -> None:
        """Call `on_before_backward`, with the loss as it is taken backward."""
        work = self._work_of(run)
        self._callback.on_before_backward(work.trainer, work.module, _scaled(run, run.loss))

    @on(ev.BackwardEnd, optional=True)
    def after_backward(self, run: Run, event: ev.BackwardEnd) -> None:
        """Call `on_after_backward`."""
        work = self._work_of(run)
        self._callback.on_after_backward(work.trainer, work.module)

    @on(ev.GradientsReady, lane=Lane.MEASURE, optional=True)
    def before_step(self, run: Run, event: ev.GradientsReady) -> None:
        """Call `on_before_optimizer_step`, before gradients are clipped."""
        work = self._work_of(run)
        self._callback.on_before_optimizer_step(work.trainer, work.module, run.optimizer)

    @on(ev.StepEnd, lane=Lane.REPORT, optional=True)
    def before_zero_grad(self, run: Run, event: ev.StepEnd) -> None:
        """Call `on_before_zero_grad`: the gradients of the step are still there."""
        work = self._work_of(run)
        self._callback.on_before_zero_grad(work.trainer, work.module, run.optimizer)

    @on(ev.BatchEnd, optional=True)
    def end_batch(self, run: Run, event: ev.BatchEnd) -> None:
        """Call `on_train_batch_end`, with the loss as it was taken backward."""
        work = self._work_of(run)
        work.batch_index = run.progress.batch - 1
        outputs = None if run.loss is None else {"loss": _scaled(run, run.loss.detach())}
        self._callback.on_train_batch_end(work.trainer, work.module, outputs, run.batch, work.batch_index)

    @on(ev.EpochEnd, lane=Lane.MEASURE, optional=True)
    def note_epoch_end(self, run: Run, event: ev.EpochEnd) -> None:
        """Note that `on_train_epoch_end` is due, once a validation at the end of the epoch is done."""
        self._work_of(run).end_epoch()
        self._is_epoch_end_due = self._ends_epochs
        self._watch_boundaries(run, watches=True)

    @on(ev.SavePoint, ev.ShouldStop, optional=True)
    def end_epoch(self, run: Run, event: ev.SavePoint | ev.ShouldStop) -> None:
        """Call `on_train_epoch_end` where there was no validation."""
        if self._is_epoch_end_due:
            self.end_epoch_of(run, None)

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def log(self, run: Run, event: ev.Log) -> None:
        """Add what the callback logged."""
        self._work_of(run).metrics.add_to(event.metrics)

    @on(ev.LastBoundary, lane=Lane.TRANSFORM)
    def leave_last_epoch(self, run: Run, event: ev.LastBoundary) -> None:
        """Count the last epoch as ended."""
        self._work_of(run).between_epochs = False

    @on(ev.TrainEnd)
    def end(self, run: Run, event: ev.TrainEnd) -> None:
        """Call `on_train_end`."""
        work = self._work_of(run)
        self._callback.on_train_end(work.trainer, work.module)

    @on(ev.RunFailed)
    def fail(self, run: Run, event: ev.RunFailed) -> None:
        """Call `on_exception`."""
        self._has_failed = True
        if self._work is not None:
            self._callback.on_exception(self._work.trainer, self._work.module, event.error)

    @on(ev.RunClosed)
    def close_run(self, run: Run, event: ev.RunClosed) -> None:
        """Call `on_fit_end` and `teardown`, unless the run has failed, as Lightning does."""
        self._is_closed, work = True, self._work
        if work is None:
            return
        if work.metrics.unlogged:
            first, *others = sorted(work.metrics.unlogged)
            more = f" and {len(others)} more" if others else ""
            run.note(f"{self.name}: what was logged after the last log is in no tracker: {first}{more}")
        if not self._has_failed:
            if work.trains:
                self._callback.on_fit_end(work.trainer, work.module)
            self._callback.teardown(work.trainer, work.module, work.function)

    def describe(self, run: Run) -> str:
        """Say whose hooks are called."""
        return f"calls the hooks of {type(self._callback).__name__} of Lightning"

    def state_dict(self) -> dict[str, Any]:
        """Return what the callback's `state_dict` and `on_save_checkpoint` give, and whether it asked for a stop."""
        if (work := self._work) is None:
            return dict(self._waiting)
        if self._unsaved is not None and (changed := self._unsaved.changed(work.run.modules.values())):
            kind = f"{type(self._callback).__name__} has no state_dict and changes {', '.join(changed)}"
            work.run.data.report_untracked(f"plugins.{self.name}", kind)
        asked = work.run.control.stop_request
        stops = {"stops": True} if asked is not None and asked.by == self.name else {}
        return saved_state(self._callback, work) | stops

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the callback its state back."""
        if (work := self._work) is None:  # it is disabled
            self._waiting = state
            return
        self._stops = state.get("stops", False)
        if "key" in state and not give_back(self._callback, work, state):
            work.run.warn(
                f"The checkpoint's state of {self.name} is of {state['key']}, and the callback is now "
                f"{self._callback.state_key}: it begins without a state. Make it as it was, or give it another name "
                f"with .named(...)."
            )

    def _work_of(self, run: Run) -> Work:
        return self._work or self.open(run)

    def _watch_boundaries(self, run: Run, *, watches: bool) -> None:
        """Let `ShouldStop` be handled after an epoch only: with a handler of it each step has a boundary."""
        run.bus.signal(ev.ShouldStop).pause(self.end_epoch, paused=not watches)

    def _begin_training(self, work: Work) -> None:
        self._has_begun = True
        self._callback.on_fit_start(work.trainer, work.module)
        self._callback.on_train_start(work.trainer, work.module)
        stateful = any(has(self._callback, self._flavour, each) for each in ("state_dict", "on_save_checkpoint"))
        only_records = is_shipped(self._callback, self._flavour, "LearningRateMonitor")
        self._unsaved = None if stateful or only_records or work.run.report.is_replay else Unsaved(self._callback)


def _scaled(run: Run, loss: Any) -> Any:
    """Return a loss as it is taken backward."""
    return loss if run.control.loss_scale == 1.0 else loss * run.control.loss_scale
