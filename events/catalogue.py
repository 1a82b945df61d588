"""The events, in the order in which the loop emits them.

Each event is a class; its name, fields and docstring are defined only here. Frequent events have no fields (read the
facts from the run) and are emitted as singletons. To declare your own event, subclass `Event`:

    class EmbeddingsReady(Event):
        path: str
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, dataclass_transform

Phase = Literal["train", "validation", "test", "predict"]
Status = Literal["completed", "stopped", "interrupted", "failed"]


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True, repr=False, eq=False)
class Event:
    """Base class of all events.

    Subclasses become frozen dataclasses. `name` is the class name in snake case.

    `apart` marks an event that is about a file or the process instead of the training. With `RNGCapture`, random
    numbers that its handlers draw do not advance the training's generators.
    """

    name: ClassVar[str] = "event"
    apart: ClassVar[bool] = False
    __test__: ClassVar[bool] = False  # pytest collects any class called Test...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__annotations__" in vars(cls):  # each function that `dataclass` generates takes 0.1 ms of the import
            dataclass(frozen=True, repr=False, eq=False)(cls)
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __repr__(self) -> str:
        values = (f"{part.name}={getattr(self, part.name)!r}" for part in fields(self) if part.repr)
        return f"{type(self).__qualname__}({', '.join(values)})"

    def __eq__(self, other: object) -> bool:
        return self.__class__ is other.__class__ and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, part.name) for part in fields(self) if part.compare)


def _refuse(_event: Event, name: str, *_value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


Event.__setattr__ = Event.__delattr__ = _refuse  # type: ignore[assignment, method-assign]  # for events without fields


class TrainStart(Event):
    """`fit` begins. A checkpoint to resume is applied after this event's handlers."""


class CheckpointLoaded(Event):
    """The run restored its state from a checkpoint.

    Emitted after `TrainStart` and before the first epoch, and after a roll-back.
    """

    apart: ClassVar[bool] = True
    path: Path | None


class EpochStart(Event):
    """An epoch begins; `epoch` counts from 0.

    `resumed` is True if the epoch had already begun when the checkpoint was saved.
    """

    epoch: int
    resumed: bool


class Replay(Event):
    """A resumed run skips batches by reading them, because the loader cannot seek.

    `done` of the `batches` before the resumed position have been read and discarded.
    """

    done: int
    batches: int


class BatchStart(Event):
    """`run.batch` was loaded and moved to the device.

    Handlers may replace the batch, skip it, hold the optimizer step or scale the loss.
    """


class ForwardEnd(Event):
    """The loss of a batch (`run.loss`) was computed; the backward pass follows.

    Emitted once for each loss if the step returns several.
    """


class BackwardEnd(Event):
    """The backward pass of a loss is done.

    Its gradients are added to the gradients of the accumulation window. With fp16 they are still scaled.
    """


class GradientsReady(Event):
    """The gradients of `run.optimizer` are complete for this window; its step follows.

    Handlers may clip the gradients or skip the step.
    """


class StepEnd(Event):
    """`run.optimizer` was stepped. Not emitted for a skipped step.

    `progress.steps` includes the step; with several optimizers, it counts their rounds.
    """


class BatchEnd(Event):
    """A micro-batch is done, with or without an optimizer step."""


class ResumeVerified(Event):
    """The repeated steps of a resumed run were compared with the original run.

    `steps` of them are bitwise identical. `difference` is the first deviation, or None.
    """

    steps: int
    difference: str | None


class ChangeServed(Event):
    """A change of the run, requested by a plugin, was applied or refused.

    Emitted at a step boundary. `verb` (set_learning_rate, enable_plugin, disable_plugin), `target`, `value` and `by`
    are copied from the request. `changed` is False if the request had no effect. `refusal` is the reason if it was
    refused, else empty.
    """

    verb: str
    target: str
    value: float | None
    by: str
    reason: str
    refusal: str = ""
    changed: bool = True


class Log(Event):
    """The means of the tracked values since the last log, on request.

    The values are on the CPU. `MEASURE` handlers may add to `metrics`; handlers of later lanes read them. `weights` is
    the total weight of each mean, for example its number of samples; empty in a replay.
    """

    metrics: dict[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)


class ValidationStart(Event):
    """A validation begins. Modules are in eval mode and gradients are off."""


class ValidationBatchStart(Event):
    """`run.batch` of the validation set `dataset` was loaded and moved to the device.

    `dataset` is empty if there is only one set.
    """

    dataset: str


class ValidationBatchEnd(Event):
    """`validation_step` ran on the batch."""

    dataset: str


class ValidationEnd(Event):
    """All validation sets are done. Modules are still in eval mode.

    `MEASURE` handlers may add to `metrics`.
    """

    metrics: dict[str, float]


class ValidationCut(Event):
    """An evaluation was cut short. Modules are still in eval mode.

    Emitted instead of `ValidationEnd`, `TestEnd` or `PredictEnd`.
    """

    reason: str


class SavePoint(Event):
    """A save was requested: plugins that store the run write their checkpoint now.

    Emitted at a step boundary, after the validation of that boundary.
    """

    apart: ClassVar[bool] = True


class CheckpointSaved(Event):
    """A checkpoint is on disk under its final name."""

    apart: ClassVar[bool] = True
    path: Path
    is_best: bool


class CheckpointPruned(Event):
    """A checkpoint was removed because newer or better ones are kept.

    `reason` names the retention rule.
    """

    apart: ClassVar[bool] = True
    path: Path
    reason: str


class ShouldStop(Event):
    """The last event of a boundary: handlers request or veto a stop.

    The loop decides afterwards.
    """


class EpochEnd(Event):
    """Epoch `epoch` is finished: its loader ended, or `end_epoch` was requested.

    `progress.epoch` already counts the epoch.
    """

    epoch: int


class LastBoundary(Event):
    """The training is over and the weights are final; the last boundary follows.

    Requests made here are served before `TrainEnd`.
    """

    apart: ClassVar[bool] = True


class TrainEnd(Event):
    """The run completed or was stopped on purpose. Not emitted after a failure."""

    apart: ClassVar[bool] = True


class TestStart(Event):
    """A test begins. Modules are in eval mode and gradients are off."""


class TestBatchStart(Event):
    """`run.batch` of the test set `dataset` was loaded and moved to the device.

    `dataset` is empty if there is only one set.
    """

    dataset: str


class TestBatchEnd(Event):
    """`test_step` ran on the batch."""

    dataset: str


class TestEnd(Event):
    """All test sets are done. `MEASURE` handlers may add to `metrics`."""

    metrics: dict[str, float]


class PredictStart(Event):
    """A prediction begins. Modules are in eval mode and gradients are off."""


class PredictBatchStart(Event):
    """`run.batch` of the set `dataset` was loaded and moved to the device.

    `dataset` is empty if there is only one set.
    """

    dataset: str


class PredictBatchEnd(Event):
    """`predict_step` ran on the batch and returned `run.outputs`."""

    dataset: str


class PredictEnd(Event):
    """All sets are predicted. `metrics` are the means of the tracked values.

    `MEASURE` handlers may add to `metrics`.
    """

    metrics: dict[str, float]


class PluginChanged(Event):
    """A plugin was registered, unregistered, enabled or disabled during a run.

    `by` names who did it, or is "the loaded state".
    """

    plugin: str
    change: Literal["registered", "unregistered", "enabled", "disabled"]
    by: str


class PluginFailed(Event):
    """A handler of an observer plugin failed on `event`; the run continues."""

    plugin: str
    event: str
    error: BaseException


class Verdict(Event):
    """A plugin judged how the training spends its time.

    `kind` begins to hold or stops holding (`holds`). `value` is the measured number, `text` the evidence.
    """

    kind: str
    holds: bool
    value: float
    text: str


class LateResult(Event):
    """A checkpoint of this training was evaluated in another process.

    `metrics`, such as `late/accuracy`, belong to the checkpoint `path` and its `steps`. The file may be removed by now.
    """

    apart: ClassVar[bool] = True
    path: Path
    steps: int
    metrics: Mapping[str, float]


class RunFailed(Event):
    """An exception ends the run.

    `plugin` and `event` name the handler that raised it, or are None if no handler did.
    """

    error: BaseException
    phase: Phase
    plugin: str | None
    event: str | None


class RunClosed(Event):
    """The last event of every run, emitted exactly once, however the run ended."""

    status: Status


CATALOGUE: tuple[type[Event], ...] = tuple(Event.__subclasses__())

# `run.log_image` and similar methods emit the events below; every tracker writes the kinds that it supports.
# The field is called `title`, because `name` is the name of the event.


class LogImage(Event):
    """An image: a `uint8` NumPy array of shape (height, width, 3)."""

    title: str
    image: Any


class LogText(Event):
    """A text. Trackers that support Markdown render it."""

    title: str
    text: str


class LogHistogram(Event):
    """Values for a histogram: a one-dimensional NumPy array."""

    title: str
    values: Any


class LogCurve(Event):
    """A precision-recall curve: labels (0 or 1) and scores (0 to 1) of samples."""

    title: str
    labels: Any
    scores: Any


class LogFile(Event):
    """A file to store with the run. It is read a little later, in another thread."""

    title: str
    path: Path
