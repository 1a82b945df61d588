"""When rules are asked: the ancestor's names of moments, and our events by theirs."""

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


def _begins(_run: Run, event: Event) -> bool:
    """Return whether an epoch begins, not continues: what was requested when it began is in the resumed state."""
    return isinstance(event, EpochStart) and not event.resumed


def _opens_window(run: Run, _event: Event) -> bool:
    return not run.stepping.window


def _is_held(run: Run, _event: Event) -> bool:
    """Return whether a micro-batch left its gradients, and no step was taken with them."""
    return run.stepping.window > 0 and not run.control.skips_batch


@dataclass(frozen=True)
class Trigger:
    """A moment at which a rule is asked.

    Attributes:
        name: as it is written in the file.
        events: at which it comes.
        comes: whether it does so at one of them.
    """

    name: str
    events: tuple[type[Event], ...]
    comes: Moment = _always


ANCESTOR = {
    trigger.name: trigger
    for trigger in (
        Trigger("on_init_end", (TrainStart,)),
        Trigger("on_train_begin", (TrainStart,)),
        Trigger("on_epoch_begin", (EpochStart,), _begins),
        Trigger("on_step_begin", (BatchStart,), _opens_window),
        Trigger("on_substep_end", (BatchEnd,), _is_held),
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
OURS = {kind.name: kind for kind in CATALOGUE}
BEFORE_BOUNDARY = (EpochEnd, LastBoundary, TrainEnd)  # what is due is served after them
NEEDS = {
    "log": (Log,),
    "validation": (ValidationStart, ValidationBatchEnd, ValidationEnd, ValidationCut),
    "save": (CheckpointSaved,),
}


def trigger_named(name: str, controller: str) -> Trigger:
    """Return the trigger of a name: the ancestor's, such as `on_log`, or an event's, `step_end` or `StepEnd`.

    Raises:
        RuleKeyError: there is none; says the nearest name.
    """
    if name in ANCESTOR:
        return ANCESTOR[name]
    kind = OURS.get(name) or next((kind for kind in CATALOGUE if kind.__name__ == name), None)
    if kind is None:
        known = known_names(name, [*ANCESTOR, *OURS])
        raise RuleKeyError(f"Controller {controller} has an invalid event ({name}).{known}")
    return Trigger(name, (kind,), _begins if kind is EpochStart else _always)


def need_of(trigger: Trigger) -> str | None:
    """Return what some plugin must ask for, or the trigger would never come; None where it comes of itself."""
    return next((word for word, kinds in NEEDS.items() if trigger.events[0] in kinds), None)
