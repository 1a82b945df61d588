"""Every event, from top to bottom in the order in which the loop emits them.

An event is a class: its name, its fields and its docstring live here and nowhere else. The hot ones carry no fields
(the facts are on the run) and are emitted as singletons. Declare your own by subclassing:

    class EmbeddingsReady(Event):
        path: str
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, dataclass_transform

Phase = Literal["train", "validation", "test", "predict"]
Status = Literal["completed", "stopped", "interrupted", "failed"]


@dataclass_transform(frozen_default=True)
class Event:
    """Base of all events. Subclasses are frozen dataclasses; `name` is the class name in snake case.

    `apart`: of a file or a process, not of the training: with `RNGCapture`, what its handlers draw is taken back.
    """

    name: ClassVar[str] = "event"
    apart: ClassVar[bool] = False
    __test__: ClassVar[bool] = False  # pytest collects any class called Test...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True)(cls)
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


class TrainStart(Event):
    """A `fit` begins. A checkpoint to resume is applied right after."""


class CheckpointLoaded(Event):
    """The run took its state from a checkpoint, after `TrainStart` and before the first epoch."""

    apart: ClassVar[bool] = True
    path: Path | None


class EpochStart(Event):
    """An epoch begins; `epoch` counts from 0. `resumed`: it had begun before the state was saved."""

    epoch: int
    resumed: bool


class Replay(Event):
    """A resumed epoch's loader cannot seek: `done` of the `batches` before its position were read again and dropped."""

    done: int
    batches: int


class BatchStart(Event):
    """`run.batch` was loaded and moved. Handlers may replace it, skip it, hold the step or scale the loss."""


class ForwardEnd(Event):
    """The loss of a batch, `run.loss`, was computed; its backward pass is next. Of several losses, one for each."""


class BackwardEnd(Event):
    """The loss was taken backward: its gradients are added to those of the window, and scaled where fp16 scales."""


class GradientsReady(Event):
    """A window's gradients, those of `run.optimizer`, are whole; its step is next. Handlers may clip or drop them."""


class StepEnd(Event):
    """`run.optimizer` was stepped, and `progress.steps` counts it, or its round. Not emitted for a skipped step."""


class BatchEnd(Event):
    """A micro-batch is done, with or without an optimizer step."""


class ResumeVerified(Event):
    """The steps that a resumed run repeated were compared with the killed run's: `steps` are equal."""

    steps: int
    difference: str | None


class ChangeServed(Event):
    """At a step boundary, a change of the run was made that `by` requested, or could not be: `refusal` says why.

    `verb` (set_learning_rate, enable_plugin, disable_plugin), `target`, `value`: the request's; `changed`: if it did.
    """

    verb: str
    target: str
    value: float | None
    by: str
    reason: str
    refusal: str = ""
    changed: bool = True


class Log(Event):
    """Asked-for means since the last log, off the device. `MEASURE` handlers add to `metrics`, later ones read.

    `weights`: how many samples, or what else they were weighted by, the means are of; empty in a replay.
    """

    metrics: dict[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)


class ValidationStart(Event):
    """A validation begins: modules are in eval mode and gradients are off."""


class ValidationBatchStart(Event):
    """`run.batch` of the validation set `dataset` was loaded and moved; the name is empty for a single set."""

    dataset: str


class ValidationBatchEnd(Event):
    """`validation_step` ran on the batch."""

    dataset: str


class ValidationEnd(Event):
    """All validation sets are done; modules are still in eval mode. `MEASURE` handlers may add to `metrics`."""

    metrics: dict[str, float]


class ValidationCut(Event):
    """Instead of `ValidationEnd`, `TestEnd` or `PredictEnd`, where it was cut short; modules are still in eval mode."""

    reason: str


class SavePoint(Event):
    """A save was asked for, at a step boundary and after its validation: a plugin that stores the run does it now."""

    apart: ClassVar[bool] = True


class CheckpointSaved(Event):
    """A checkpoint is on disk under its final name."""

    apart: ClassVar[bool] = True
    path: Path
    is_best: bool


class CheckpointPruned(Event):
    """A checkpoint was removed, since newer or better ones are kept; `reason` says by which rule."""

    apart: ClassVar[bool] = True
    path: Path
    reason: str


class ShouldStop(Event):
    """The last word at a boundary: plugins ask for a stop or veto one, with `control`, then the loop decides."""


class EpochEnd(Event):
    """Epoch `epoch` is finished: its loader ended or `end_epoch` was granted. `progress.epoch` counts it already."""

    epoch: int


class LastBoundary(Event):
    """The training is over, and its weights are as they were trained: what is asked for now precedes `TrainEnd`."""

    apart: ClassVar[bool] = True


class TrainEnd(Event):
    """The run completed or was stopped on purpose; never emitted after a failure."""

    apart: ClassVar[bool] = True


class TestStart(Event):
    """A test begins: modules are in eval mode and gradients are off."""


class TestBatchStart(Event):
    """`run.batch` of the test set `dataset` was loaded and moved; the name is empty for a single set."""

    dataset: str


class TestBatchEnd(Event):
    """`test_step` ran on the batch."""

    dataset: str


class TestEnd(Event):
    """All test sets are done. `MEASURE` handlers may add to `metrics`."""

    metrics: dict[str, float]


class PredictStart(Event):
    """A prediction begins: modules are in eval mode and gradients are off."""


class PredictBatchStart(Event):
    """`run.batch` of the set `dataset` was loaded and moved; the name is empty for a single set."""

    dataset: str


class PredictBatchEnd(Event):
    """`predict_step` ran on the batch; `run.outputs` is what it returned."""

    dataset: str


class PredictEnd(Event):
    """All sets are predicted; the metrics are what was tracked. `MEASURE` handlers may add to `metrics`."""

    metrics: dict[str, float]


class PluginChanged(Event):
    """A plugin was registered, unregistered, enabled or disabled in a run; `by`: who did it, or "the loaded state"."""

    plugin: str
    change: Literal["registered", "unregistered", "enabled", "disabled"]
    by: str


class PluginFailed(Event):
    """The handler of an observer plugin failed on `event`, and the run continues."""

    plugin: str
    event: str
    error: BaseException


class Verdict(Event):
    """A plugin has judged where the time of the training goes: `kind` begins to hold, or does so no longer.

    `value` is the number that it was judged by, `text` the evidence in words.
    """

    kind: str
    holds: bool
    value: float
    text: str


class RunFailed(Event):
    """An exception ends the run; `plugin` and `event` name the handler that raised it, if one did."""

    error: BaseException
    phase: Phase
    plugin: str | None
    event: str | None


class RunClosed(Event):
    """The very last event of every run, exactly once, however it ended."""

    status: Status


CATALOGUE: tuple[type[Event], ...] = tuple(Event.__subclasses__())
