"""Triggers: the trigger names of fms-hf-tuning, and Heliograph's events by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointSaved,
    EpochEnd,
    EpochStart,
    GradientsReady,
    LastBoundary,
    Log,
    PredictBatchEnd,
    PredictEnd,
    Run,
    StepEnd,
    TestBatchEnd,
    TestEnd,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationCut,
    ValidationEnd,
    ValidationStart,
)
from heliograph.events import CATALOGUE, Event
from heliograph.spi import known_names

from ..errors import RuleKeyError

Moment = Callable[[Run, Event], bool]


def _always(_run: Run, _event: Event) -> bool:
    return True


def _is_new_epoch(_run: Run, event: Event) -> bool:
    # Not a resumed epoch: the resumed state contains the requests from its start.
    return isinstance(event, EpochStart) and not event.resumed


def _opens_window(run: Run, _event: Event) -> bool:
    return not run.stepping.window


def _ends_without_step(run: Run, _event: Event) -> bool:
    return run.stepping.window > 0 and not run.control.skips_batch


@dataclass(frozen=True)
class Trigger:
    """A moment at which rules are evaluated.

    Attributes:
        name: the name in the file.
        events: the events that may trigger it.
        applies: whether one of these events triggers it.
    """

    name: str
    events: tuple[type[Event], ...]
    applies: Moment = _always


ANCESTOR = {
    trigger.name: trigger
    for trigger in (
        Trigger("on_init_end", (TrainStart,)),
        Trigger("on_train_begin", (TrainStart,)),
        Trigger("on_epoch_begin", (EpochStart,), _is_new_epoch),
        Trigger("on_step_begin", (BatchStart,), _opens_window),
        Trigger("on_substep_end", (BatchEnd,), _ends_without_step),
        Trigger("on_pre_optimizer_step", (GradientsReady,)),
        Trigger("on_optimizer_step", (StepEnd,)),
        Trigger("on_step_end", (StepEnd,)),
        Trigger("on_log", (Log,)),
        Trigger("on_evaluate", (ValidationEnd,)),
        Trigger("on_prediction_step", (ValidationBatchEnd, TestBatchEnd, PredictBatchEnd)),
        Trigger("on_predict", (TestEnd, PredictEnd)),
        Trigger("on_save", (CheckpointSaved,)),
        Trigger("on_epoch_end", (EpochEnd,)),
        Trigger("on_train_end", (TrainEnd,)),
    )
}
EVENTS = {kind.name: kind for kind in CATALOGUE}
BEFORE_BOUNDARY = (EpochEnd, LastBoundary, TrainEnd)  # the boundary after them serves the requests
NEEDED_REQUESTS = {
    "log": (Log,),
    "validation": (ValidationStart, ValidationBatchEnd, ValidationEnd, ValidationCut),
    "save": (CheckpointSaved,),
}


def find_trigger(name: str, controller: str) -> Trigger:
    if name in ANCESTOR:
        return ANCESTOR[name]
    kind = EVENTS.get(name) or next((kind for kind in CATALOGUE if kind.__name__ == name), None)
    if kind is None:
        hint = known_names(name, [*ANCESTOR, *EVENTS])
        raise RuleKeyError(f"Controller {controller} has an invalid event ({name}).{hint}")
    return Trigger(name, (kind,), _is_new_epoch if kind is EpochStart else _always)


def needed_request(trigger: Trigger) -> str | None:
    # The request without which the trigger never occurs.
    return next((word for word, kinds in NEEDED_REQUESTS.items() if trigger.events[0] in kinds), None)
