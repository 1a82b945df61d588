"""The plugin for a callback of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from heliograph import Lane, Plugin, Run, on
from heliograph import events as ev
from heliograph.plugins import snake_case
from heliograph.spi import require

from ..own_states import Unsaved, refuse_replay
from .facade import UNEXPLAINED
from .flavour import Flavour, flavour_of
from .refused import check_averaging, check_served, is_shipped
from .work import RunView

BEGINNINGS = ("setup", "teardown")  # a validation, test or prediction may be the whole run
HOOKS: Mapping[type[ev.Event], tuple[str, ...]] = {
    ev.BatchStart: ("on_train_batch_start",),
    ev.ForwardEnd: ("on_before_backward",),
    ev.BackwardEnd: ("on_after_backward",),
    ev.GradientsReady: ("on_before_optimizer_step",),
    ev.StepEnd: ("on_before_zero_grad",),
    ev.BatchEnd: ("on_train_batch_end",),
    ev.ValidationStart: ("on_validation_start", "on_validation_epoch_start", *BEGINNINGS),
    ev.ValidationBatchStart: ("on_validation_batch_start",),
    ev.ValidationBatchEnd: ("on_validation_batch_end",),
    ev.ValidationEnd: ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"),
    ev.ValidationCut: ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end"),
    ev.SavePoint: ("on_train_epoch_end",),
    ev.ShouldStop: ("on_train_epoch_end",),
    ev.TestStart: ("on_test_start", "on_test_epoch_start", *BEGINNINGS),
    ev.TestBatchStart: ("on_test_batch_start",),
    ev.TestBatchEnd: ("on_test_batch_end",),
    ev.TestEnd: ("on_test_epoch_end", "on_test_end"),
    ev.PredictStart: ("on_predict_start", "on_predict_epoch_start", *BEGINNINGS),
    ev.PredictBatchStart: ("on_predict_batch_start",),
    ev.PredictBatchEnd: ("on_predict_batch_end",),
    ev.PredictEnd: ("on_predict_epoch_end", "on_predict_end"),
}
EvaluationStart = ev.ValidationStart | ev.TestStart | ev.PredictStart
EvaluationBatchStart = ev.ValidationBatchStart | ev.TestBatchStart | ev.PredictBatchStart
EvaluationBatchEnd = ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd
EvaluationEnd = ev.ValidationEnd | ev.TestEnd | ev.PredictEnd
NEVER = ("on_sanity_check_start", "on_sanity_check_end")


def has(callback: Any, flavour: Flavour, hook: str) -> bool:
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(flavour.callback, hook)


def saved_state(callback: Any, work: RunView) -> dict[str, Any]:
    """Return the state of a callback.

    `on_save_checkpoint` gets a checkpoint with `state_dict`, `epoch`, `global_step` and `callbacks`; added and
    replaced items are saved.
    """
    state = callback.state_dict()
    added = _added(callback, work, state) if has(callback, work.flavour, "on_save_checkpoint") else {}
    if not state and not added:
        return {}
    return {"key": callback.state_key, "callback": _plain(state), "checkpoint": _plain(added)}


def give_back(callback: Any, work: RunView, saved: Mapping[str, Any]) -> bool:
    if saved["key"] != callback.state_key:
        return False
    state = deepcopy(saved["callback"])
    if has(callback, work.flavour, "on_load_checkpoint"):
        checkpoint = _checkpoint(callback, work, state) | deepcopy(saved["checkpoint"])
        callback.on_load_checkpoint(work.trainer, work.module, checkpoint)
    if state:
        callback.load_state_dict(state)
    return True


def _added(callback: Any, work: RunView, state: Any) -> dict[str, Any]:
    checkpoint = _checkpoint(callback, work, state)
    before, weights = dict(checkpoint), dict(checkpoint["state_dict"])
    callback.on_save_checkpoint(work.trainer, work.module, checkpoint)
    added = {name: value for name, value in checkpoint.items() if name not in before or value is not before[name]}
    now = checkpoint["state_dict"]
    if now.keys() != weights.keys() or any(now[name] is not weights[name] for name in now):
        added["state_dict"] = now
    return added


def _checkpoint(callback: Any, work: RunView, state: Any) -> dict[str, Any]:
    return {
        "state_dict": work.module.state_dict(),
        "epoch": work.epoch,
        "global_step": work.run.progress.steps,
        "callbacks": {callback.state_key: state},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


class LightningCallback(Plugin):
    """A callback of Lightning; created by `from_lightning`."""

    asks = ("stop",)

    def __init__(self, callback: Any, flavour: Flavour) -> None:
        self._callback, self._flavour = callback, flavour
        self.name = f"lightning_{snake_case(type(callback).__name__)}"
        self.ignores = tuple(
            event for event, hooks in HOOKS.items() if not any(has(callback, flavour, hook) for hook in hooks)
        )
        self._work: RunView | None = None
        self._waiting: Mapping[str, Any] = {}  # a state to load in `open`
        self._is_used = self._is_closed = self._has_failed = False
        self._is_epoch_end_due = False  # an epoch has ended for which `on_train_epoch_end` was not called yet
        self._has_begun = self._stops = False
        self._unsaved: Unsaved | None = None
        self._ends_epochs = has(callback, flavour, "on_train_epoch_end")

    def reset(self) -> None:
        if self._is_used:
            kind = type(self._callback).__name__
            raise RuntimeError(
                f"{self.name} was already used in a training, and Lightning callbacks cannot be reset: register a new "
                f"one, from_lightning({kind}(...)), and unregister {self.name!r}."
            )
        self._waiting = {}

    def open(self, run: Run) -> RunView:
        refuse_replay(run)
        self._work = work = RunView.of(run, self._flavour)
        self._has_failed = self._is_closed = False
        work.attach(self._callback)
        if work.trains:
            self._is_used = True
            check_averaging(self._callback, self._flavour, run)
            if never := [hook for hook in NEVER if has(self._callback, self._flavour, hook)]:
                run.warn(
                    f"{' and '.join(never)} of {type(self._callback).__name__} will not be called, because there is no "
                    f"sanity check. ValidationSchedule(..., at_start=True) validates before the first step."
                )
        self._callback.setup(work.trainer, work.module, work.function)
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self.load_state_dict(waiting)
        return work

    def close(self) -> None:
        if self._work is not None:
            self._waiting = {} if self._is_closed else deepcopy(self.state_dict())
            self._work.detach(self._callback)
            self._work = None

    @on(ev.TrainStart, lane=Lane.REPORT)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        self.open(run)
        self._has_begun = self._stops = self._is_epoch_end_due = False
        if not run.checkpoints.is_resuming:
            self._begin_training(self._work_of(run))

    @on(ev.CheckpointLoaded)
    def continue_training(self, run: Run, event: ev.CheckpointLoaded) -> None:
        work = self._work_of(run)
        work.between_epochs = self._is_epoch_end_due = False
        work.metrics.forget()
        if not self._has_begun:
            self._begin_training(work)
        if self._stops:
            run.control.stop("the callback had set trainer.should_stop before the checkpoint was saved")

    @on(ev.EpochStart)
    def begin_epoch(self, run: Run, event: ev.EpochStart) -> None:
        work = self._work_of(run)
        work.between_epochs = False
        self._watch_boundaries(run, watches=False)
        if not event.resumed:
            self._callback.on_train_epoch_start(work.trainer, work.module)

    @on(ev.BatchStart, optional=True)
    def begin_batch(self, run: Run, event: ev.BatchStart) -> None:
        index = self._work_of(run).batch_index = run.progress.batch
        self._call(run, "on_train_batch_start", run.batch, index)

    @on(ev.ForwardEnd, optional=True)
    def before_backward(self, run: Run, event: ev.ForwardEnd) -> None:
        self._call(run, "on_before_backward", _scaled(run, run.loss))

    @on(ev.BackwardEnd, optional=True)
    def after_backward(self, run: Run, event: ev.BackwardEnd) -> None:
        self._call(run, "on_after_backward")

    @on(ev.GradientsReady, lane=Lane.MEASURE, optional=True)
    def before_step(self, run: Run, event: ev.GradientsReady) -> None:
        self._call(run, "on_before_optimizer_step", run.optimizer)

    @on(ev.StepEnd, lane=Lane.REPORT, optional=True)
    def before_zero_grad(self, run: Run, event: ev.StepEnd) -> None:
        self._call(run, "on_before_zero_grad", run.optimizer)

    @on(ev.BatchEnd, optional=True)
    def end_batch(self, run: Run, event: ev.BatchEnd) -> None:
        index = self._work_of(run).batch_index = run.progress.batch - 1
        outputs = None if run.loss is None else {"loss": _scaled(run, run.loss.detach())}
        self._call(run, "on_train_batch_end", outputs, run.batch, index)

    @on(ev.EpochEnd, lane=Lane.MEASURE, optional=True)
    def note_epoch_end(self, run: Run, event: ev.EpochEnd) -> None:
        self._work_of(run).between_epochs = True
        self._is_epoch_end_due = self._ends_epochs
        self._watch_boundaries(run, watches=True)

    @on(ev.SavePoint, ev.ShouldStop, optional=True)
    def end_epoch(self, run: Run, event: ev.SavePoint | ev.ShouldStop) -> None:
        if self._is_epoch_end_due:
            self.end_epoch_of(run, None)

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def log(self, run: Run, event: ev.Log) -> None:
        self._work_of(run).metrics.add_to(event.metrics)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, optional=True)
    def begin_evaluation(self, run: Run, event: EvaluationStart) -> None:
        self._call(run, f"on_{run.phase}_start")
        self._call(run, f"on_{run.phase}_epoch_start")

    @on(ev.ValidationBatchStart, ev.TestBatchStart, ev.PredictBatchStart, optional=True)
    def begin_evaluated_batch(self, run: Run, event: EvaluationBatchStart) -> None:
        place = self._work_of(run).place(event.dataset, run.progress.evaluated)
        self._call(run, f"on_{run.phase}_batch_start", run.batch, *place)

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd, optional=True)
    def end_evaluated_batch(self, run: Run, event: EvaluationBatchEnd) -> None:
        place = self._work_of(run).place(event.dataset, run.progress.evaluated - 1)
        self._call(run, f"on_{run.phase}_batch_end", run.outputs, run.batch, *place)

    @on(ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, lane=Lane.MEASURE, optional=True)
    def end_evaluation_epoch(self, run: Run, event: EvaluationEnd) -> None:
        self.call_with(run, event.metrics, f"on_{run.phase}_epoch_end")

    @on(ev.ValidationEnd, ev.TestEnd, ev.PredictEnd, optional=True)
    def end_evaluation(self, run: Run, event: EvaluationEnd) -> None:
        self.call_with(run, event.metrics, f"on_{run.phase}_end")
        self.end_epoch_of(run, event.metrics)

    @on(ev.ValidationCut, optional=True)
    def leave_evaluation(self, run: Run, event: ev.ValidationCut) -> None:
        self.call_with(run, None, f"on_{run.phase}_epoch_end")

    @on(ev.LastBoundary, lane=Lane.TRANSFORM)
    def leave_last_epoch(self, run: Run, event: ev.LastBoundary) -> None:
        self._work_of(run).between_epochs = False

    @on(ev.TrainEnd)
    def end(self, run: Run, event: ev.TrainEnd) -> None:
        self._call(run, "on_train_end")

    @on(ev.RunFailed)
    def fail(self, run: Run, event: ev.RunFailed) -> None:
        self._has_failed = True
        if self._work is not None:
            self._callback.on_exception(self._work.trainer, self._work.module, event.error)

    @on(ev.RunClosed)
    def close_run(self, run: Run, event: ev.RunClosed) -> None:
        self._is_closed, work = True, self._work
        if work is None:
            return
        if work.metrics.unlogged:
            first, *more_names = sorted(work.metrics.unlogged)
            more = f" and {len(more_names)} more" if more_names else ""
            run.note(f"{self.name}: values after the last log reach no tracker: {first}{more}")
        if not self._has_failed:
            if work.trains:
                self._callback.on_fit_end(work.trainer, work.module)
            self._callback.teardown(work.trainer, work.module, work.function)

    def describe(self, run: Run) -> str:
        return f"calls the hooks of {type(self._callback).__name__} of Lightning"

    def state_dict(self) -> dict[str, Any]:
        if (work := self._work) is None:
            return dict(self._waiting)
        if self._unsaved is not None and (changed := self._unsaved.changed(work.run.modules.values())):
            kind = f"{type(self._callback).__name__} has no state_dict and changes {', '.join(changed)}"
            work.run.data.report_untracked(f"plugins.{self.name}", kind)
        asked = work.run.control.stop_request
        stops = {"stops": True} if asked is not None and asked.by == self.name else {}
        return saved_state(self._callback, work) | stops

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (work := self._work) is None:  # it is disabled
            self._waiting = state
            return
        self._stops = state.get("stops", False)
        if "key" in state and not give_back(self._callback, work, state):
            work.run.warn(
                f"The checkpoint's state of {self.name} has the state_key {state['key']}, but the callback has "
                f"{self._callback.state_key}: it starts fresh. Restore its arguments, or rename it with .named(...)."
            )

    def call_with(self, run: Run, metrics: dict[str, float] | None, hook: str) -> None:
        work = self._work_of(run)
        work.metrics.measured = metrics
        try:
            self._call(run, hook)
        finally:
            work.metrics.measured = None
        request, reason = run.control.stop_request, getattr(self._callback, "stopping_reason_message", None)
        if reason and request is not None and (request.by, request.reason) == (self.name, UNEXPLAINED):
            request.reason = reason.removesuffix(" Signaling Trainer to stop.")

    def end_epoch_of(self, run: Run, metrics: dict[str, float] | None) -> None:
        work: Any = self._work
        if self._is_epoch_end_due and work is not None:
            self._is_epoch_end_due, work.in_epoch_end = False, True
            try:
                self.call_with(run, metrics, "on_train_epoch_end")
            finally:
                work.in_epoch_end = False

    def _work_of(self, run: Run) -> RunView:
        return self._work or self.open(run)

    def _call(self, run: Run, hook: str, *arguments: Any) -> None:
        work = self._work_of(run)
        getattr(self._callback, hook)(work.trainer, work.module, *arguments)

    def _watch_boundaries(self, run: Run, *, watches: bool) -> None:
        """Handle `ShouldStop` only after an epoch, because a handler of it creates a boundary at each step."""
        run.bus.signal(ev.ShouldStop).pause(self.end_epoch, paused=not watches)

    def _begin_training(self, work: RunView) -> None:
        self._has_begun = True
        self._callback.on_fit_start(work.trainer, work.module)
        self._callback.on_train_start(work.trainer, work.module)
        stateful = any(has(self._callback, self._flavour, method) for method in ("state_dict", "on_save_checkpoint"))
        only_records = is_shipped(self._callback, self._flavour, "LearningRateMonitor")
        self._unsaved = None if stateful or only_records else Unsaved(self._callback)


def from_lightning(callback: Any) -> LightningCallback:
    """Return a plugin that calls a callback of `lightning.pytorch` or `pytorch_lightning`.

    Its hooks are called at the events of a Heliograph training, with a `trainer` and a `pl_module` that present
    the run. Setting `trainer.should_stop` becomes a request to stop by the plugin. The plugin's name is `lightning_`
    and the callback's class, such as `lightning_early_stopping`; `.named(...)` changes it. Checkpoints contain the
    callback's state.

    Args:
        callback: an instance of a subclass of `Callback`, for one training.

    Raises:
        ImportError: Lightning is not installed.
        TypeError: the callback has the wrong type.
        ValueError: the callback is not supported; the message names an alternative.
    """
    flavour = flavour_of(callback)
    if flavour is None:
        require("lightning.pytorch", "from_lightning", extra="lightning")
        example = "from_lightning(EarlyStopping('val_loss'))"
        raise TypeError(f"from_lightning takes a callback of Lightning, an object, as in {example}; got {callback!r}.")
    check_served(callback)
    return LightningCallback(callback, flavour)


def _scaled(run: Run, loss: Any) -> Any:
    return loss if run.control.loss_scale == 1.0 else loss * run.control.loss_scale
