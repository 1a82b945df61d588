"""Which events call which hooks of a callback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heliograph import events as ev

from .flavour import Flavour

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
NEVER = ("on_sanity_check_start", "on_sanity_check_end")


def has(callback: Any, flavour: Flavour, hook: str) -> bool:
    """Return whether a callback has a hook of its own."""
    own = getattr(callback, hook)
    return getattr(own, "__func__", own) is not getattr(flavour.callback, hook)


def unused_events(callback: Any, flavour: Flavour) -> tuple[type[ev.Event], ...]:
    """Return the events for which a callback has no hook: they are not connected, and cost nothing."""
    return tuple(event for event, hooks in HOOKS.items() if not any(has(callback, flavour, each) for each in hooks))
