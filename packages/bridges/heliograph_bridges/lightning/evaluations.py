"""The hooks of validations, tests and predictions."""

from __future__ import annotations

from typing import Any

from heliograph import (
    Lane,
    PredictBatchEnd,
    PredictBatchStart,
    PredictEnd,
    PredictStart,
    Run,
    TestBatchEnd,
    TestBatchStart,
    TestEnd,
    TestStart,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
    on,
)

from .base import BridgedCallback
from .facade import UNEXPLAINED

Start = ValidationStart | TestStart | PredictStart
BatchStart = ValidationBatchStart | TestBatchStart | PredictBatchStart
BatchEnd = ValidationBatchEnd | TestBatchEnd | PredictBatchEnd
End = ValidationEnd | TestEnd | PredictEnd


class EvaluationHooks(BridgedCallback):
    """Calls the hooks of validations, tests and predictions."""

    @on(ValidationStart, TestStart, PredictStart, optional=True)
    def begin_evaluation(self, run: Run, event: Start) -> None:
        """Call `on_validation_start` and `on_validation_epoch_start`, or those of a test or prediction."""
        work = self._work or self.open(run)
        for hook in ("start", "epoch_start"):
            getattr(self._callback, f"on_{run.phase}_{hook}")(work.trainer, work.module)

    @on(ValidationBatchStart, TestBatchStart, PredictBatchStart, optional=True)
    def begin_evaluated_batch(self, run: Run, event: BatchStart) -> None:
        """Call `on_validation_batch_start`, or that of a test or prediction."""
        work = self._work or self.open(run)
        place = work.place(event.dataset, run.progress.evaluated)
        getattr(self._callback, f"on_{run.phase}_batch_start")(work.trainer, work.module, run.batch, *place)

    @on(ValidationBatchEnd, TestBatchEnd, PredictBatchEnd, optional=True)
    def end_evaluated_batch(self, run: Run, event: BatchEnd) -> None:
        """Call `on_validation_batch_end`, or that of a test or prediction."""
        work = self._work or self.open(run)
        place = work.place(event.dataset, run.progress.evaluated - 1)
        hook = getattr(self._callback, f"on_{run.phase}_batch_end")
        hook(work.trainer, work.module, run.outputs, run.batch, *place)

    @on(ValidationEnd, TestEnd, PredictEnd, lane=Lane.MEASURE, optional=True)
    def end_evaluation_epoch(self, run: Run, event: End) -> None:
        """Call `on_validation_epoch_end`, or that of a test or prediction: what it logs is a metric of the event."""
        self.call_with(run, event.metrics, f"on_{run.phase}_epoch_end")

    @on(ValidationEnd, TestEnd, PredictEnd, optional=True)
    def end_evaluation(self, run: Run, event: End) -> None:
        """Call `on_validation_end`, or that of a test or prediction; then, after an epoch, `on_train_epoch_end`."""
        self.call_with(run, event.metrics, f"on_{run.phase}_end")
        self.end_epoch_of(run, event.metrics)

    @on(ValidationCut, optional=True)
    def leave_evaluation(self, run: Run, event: ValidationCut) -> None:
        """Call `on_validation_epoch_end`, or that of a test or prediction, and not `on_validation_end`."""
        self.call_with(run, None, f"on_{run.phase}_epoch_end")

    def call_with(self, run: Run, metrics: dict[str, float] | None, hook: str) -> None:
        """Call a hook, with metrics that the run does not have yet."""
        work = self._work or self.open(run)
        work.metrics.measured = metrics
        try:
            getattr(self._callback, hook)(work.trainer, work.module)
        finally:
            work.metrics.measured = None
        self._explain_stop(run)

    def _explain_stop(self, run: Run) -> None:
        """Give the request to stop the callback's own reason, which `EarlyStopping` has only after it has asked."""
        request, reason = run.control.stop_request, getattr(self._callback, "stopping_reason_message", None)
        if reason and request is not None and (request.by, request.reason) == (self.name, UNEXPLAINED):
            request.reason = reason.removesuffix(" Signaling Trainer to stop.")

    def end_epoch_of(self, run: Run, metrics: dict[str, float] | None) -> None:
        """Call `on_train_epoch_end`, if an epoch has ended and it was not called yet."""
        work: Any = self._work
        if self._is_epoch_end_due and work is not None:
            self._is_epoch_end_due, work.in_epoch_end = False, True
            try:
                self.call_with(run, metrics, "on_train_epoch_end")
            finally:
                work.in_epoch_end = False
