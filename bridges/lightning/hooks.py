"""Which events call which hooks of a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...events import (
    BackwardEnd,
    BatchEnd,
    BatchStart,
    Event,
    ForwardEnd,
    GradientsReady,
    PredictBatchEnd,
    PredictBatchStart,
    PredictEnd,
    PredictStart,
    SavePoint,
    ShouldStop,
    StepEnd,
    TestBatchEnd,
    TestBatchStart,
    TestEnd,
    TestStart,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from .flavour import Flavour

BEGINNINGS = ("setup", "teardown")  # a validation, test or prediction may be the whole run
HOOKS: Mapping[type[Event], tuple[str, ...]] = {
    BatchStart: ("on_train_batch_start",),
    ForwardEnd: ("on_before_backward",),
    BackwardEnd: ("on_after_backward",),
    GradientsReady: ("on_before_optimizer_step",),
    StepEnd: ("on_before_zero_grad",),
    BatchEnd: ("on_train_batch_end",),
    ValidationStart: ("on_validation_start", "on_validation_epoch_start", *BEGINNINGS),
    ValidationBatchStart: ("on_validation_batch_start",),
    ValidationBatchEnd: ("on_validation_batch_end",),
    ValidationEnd: ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"),
    ValidationCut: ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end"),
    SavePoint: ("on_train_epoch_end",),
    ShouldStop: ("on_train_epoch_end",),
    TestStart: ("on_test_start", "on_test_epoch_start", *BEGINNINGS),
    TestBatchStart: ("on_test_batch_start",),
    TestBatchEnd: ("on_test_batch_end",),
    TestEnd: ("on_test_epoch_end", "on_test_end"),
    PredictStart: ("on_predict_start", "on_predict_epoch_start", *BEGINNINGS),
    PredictBatchStart: ("on_predict_batch_start",),
    PredictBatchEnd: ("on_predict_batch_end",),
    PredictEnd: ("on_predict_epoch_end", "on_predict_end"),
}
NEVER = ("on_sanity_check_start", "on_sanity_check_end")


def has(callback: Any, flavour: Flavour, hook: str) -> bool:
    """Return whether a callback has a hook of its own."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(flavour.callback, hook)


def unused_events(callback: Any, flavour: Flavour) -> tuple[type[Event], ...]:
    """Return the events for which a callback has no hook: they are not connected, and cost nothing."""
    return tuple(event for event, hooks in HOOKS.items() if not any(has(callback, flavour, each) for each in hooks))
