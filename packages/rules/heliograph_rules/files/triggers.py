"""Triggers: the trigger names of fms-hf-tuning, and Heliograph's events by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import heliograph as h
from heliograph.events import CATALOGUE, Event
from heliograph.spi import known_names

from ..errors import RuleKeyError

Moment = Callable[[h.Run, Event], bool]


def _is_new_epoch(_run: h.Run, event: Event) -> bool:
    # Not a resumed epoch: the resumed state contains the requests from its start.
    return isinstance(event, h.EpochStart) and not event.resumed


def _opens_window(run: h.Run, _event: Event) -> bool:
    return not run.stepping.window


def _ends_without_step(run: h.Run, _event: Event) -> bool:
    return run.stepping.window > 0 and not run.control.skips_batch


@dataclass(frozen=True)
class Trigger:
    """A moment at which rules are evaluated.

    Attributes:
        name: the name in the file.
        events: the events that may trigger it.
        applies: whether one of these events triggers it; None if always.
    """

    name: str
    events: tuple[type[Event], ...]
    applies: Moment | None = None


ANCESTOR = {
    trigger.name: trigger
    for trigger in (
        Trigger("on_init_end", (h.TrainStart,)),
        Trigger("on_train_begin", (h.TrainStart,)),
        Trigger("on_epoch_begin", (h.EpochStart,), _is_new_epoch),
        Trigger("on_step_begin", (h.BatchStart,), _opens_window),
        Trigger("on_substep_end", (h.BatchEnd,), _ends_without_step),
        Trigger("on_pre_optimizer_step", (h.GradientsReady,)),
        Trigger("on_optimizer_step", (h.StepEnd,)),
        Trigger("on_step_end", (h.StepEnd,)),
        Trigger("on_log", (h.Log,)),
        Trigger("on_evaluate", (h.ValidationEnd,)),
        Trigger("on_prediction_step", (h.ValidationBatchEnd, h.TestBatchEnd, h.PredictBatchEnd)),
        Trigger("on_predict", (h.TestEnd, h.PredictEnd)),
        Trigger("on_save", (h.CheckpointSaved,)),
        Trigger("on_epoch_end", (h.EpochEnd,)),
        Trigger("on_train_end", (h.TrainEnd,)),
    )
}
EVENTS = {kind.name: kind for kind in CATALOGUE}
BEFORE_BOUNDARY = (h.EpochEnd, h.LastBoundary, h.TrainEnd)  # the boundary after them serves the requests
NEEDED_REQUESTS = {
    "log": (h.Log,),
    "validation": (h.ValidationStart, h.ValidationBatchEnd, h.ValidationEnd, h.ValidationCut),
    "save": (h.CheckpointSaved,),
}


def find_trigger(name: str, controller: str) -> Trigger:
    if name in ANCESTOR:
        return ANCESTOR[name]
    kind = EVENTS.get(name) or next((kind for kind in CATALOGUE if kind.__name__ == name), None)
    if kind is None:
        hint = known_names(name, [*ANCESTOR, *EVENTS])
        raise RuleKeyError(f"Controller {controller} has an invalid event ({name}).{hint}")
    return Trigger(name, (kind,), _is_new_epoch if kind is h.EpochStart else None)


def needed_request(trigger: Trigger) -> str | None:
    # The request without which the trigger never occurs.
    return next((word for word, kinds in NEEDED_REQUESTS.items() if trigger.events[0] in kinds), None)
