"""`control.cut_validation`: a validation or test that is left before its end."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Event,
    Every,
    Lane,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    TestBatchEnd,
    TestStart,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationCut,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import Batch, EventRecorder, class_batches, linear_classifier
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn


class Cut(Plugin):
    """Cuts validations short, at one event of a running one."""

    def __init__(self, kind: type[Event], *, evaluated: int = 0, times: int = 1) -> None:
        self.kind, self.evaluated, self.times = kind, evaluated, times
        self.modes: list[tuple[bool, str]] = []

    @on(ValidationStart, ValidationBatchStart, ValidationBatchEnd)
    def cut(self, run: Run, event: ValidationStart | ValidationBatchStart | ValidationBatchEnd) -> None:
        if isinstance(event, self.kind) and run.progress.evaluated >= self.evaluated and self.times:
            self.times -= 1
            run.control.cut_validation("no time")

    @on(TestStart, TestBatchEnd)
    def cut_test(self, run: Run, event: TestStart | TestBatchEnd) -> None:
        if run.progress.evaluated >= self.evaluated:
            run.control.cut_validation("no time")

    @on(ValidationCut)
    def look(self, run: Run, event: ValidationCut) -> None:
        assert event.reason == "no time"
        self.modes.append((run.modules["model"].training, run.phase))


class Stop(Cut):
    """Stops the training, too."""

    @on(ValidationCut, lane=Lane.REPORT)
    def stop(self, run: Run, event: ValidationCut) -> None:
        run.control.stop("no time")


class Keep(Plugin):
    """Keeps the state at every save point, and may begin with one."""

    affects_training = False

    def __init__(self, begin_with: dict[str, Any] | None = None) -> None:
        self.begin_with = begin_with
        self.states: list[dict[str, Any]] = []

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        if self.begin_with is not None:
            run.resume(self.begin_with)

    @on(SavePoint)
    def keep(self, run: Run, event: SavePoint) -> None:
        self.states.append(deepcopy(run.state_dict()))


def fit(*plugins: Any, schedule: Plugin | None = None, **options: Any) -> tuple[list[str], RunResult]:
    trainer = Trainer([schedule or ValidationSchedule(Every(steps=2)), *plugins], device="cpu")
    recorder = EventRecorder(trainer.bus)
    options = {"validation": class_batches(3), **options}
    return recorder.trace, kit.fit(trainer, train=class_batches(4), **options)


def of_validations(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("validation")]


END = ["last_boundary", "train_end", "run_closed"]
WHOLE = ["validation_start", *["validation_batch_start", "validation_batch_end"] * 3, "validation_end"]


@pytest.mark.parametrize(
    ("kind", "evaluated", "batches"),
    [(ValidationStart, 0, 0), (ValidationBatchStart, 1, 2), (ValidationBatchEnd, 2, 2), (ValidationBatchEnd, 3, 3)],
)
def test_it_ends_at_the_next_batch_without_metrics(kind: type[Event], evaluated: int, batches: int) -> None:
    plugin = Cut(kind, evaluated=evaluated)
    names, result = fit(plugin)
    part = ["validation_start", *["validation_batch_start", "validation_batch_end"] * batches, "validation_cut"]
    assert of_validations(names) == [*part, *WHOLE]
    assert (result.status, result.progress.validations, result.progress.steps) == ("completed", 1, 4)
    assert plugin.modes == [(False, "validation")]


def test_no_metric_is_left_of_it() -> None:
    _, result = fit(Cut(ValidationBatchEnd, times=9))
    assert (result.metrics, result.progress.validations) == ({}, 0)


def test_the_sets_after_it_are_left_out_and_the_training_continues() -> None:
    sets = {"one": class_batches(2), "two": class_batches(2)}
    names, result = fit(Cut(ValidationBatchEnd, evaluated=1), validation=sets)
    assert names.count("validation_batch_end") == 1 + 4
    assert set(result.metrics) == {"validation/one/loss", "validation/two/loss"}


def test_a_loader_is_not_read_further_than_it_was() -> None:
    read: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Batch]:
            for index, batch in enumerate(class_batches(3)):
                read.append(index)
                yield batch

    fit(Cut(ValidationBatchEnd, evaluated=1, times=9), validation=Loader())
    assert read == [0, 0]


def test_what_follows_the_cut_is_served_and_the_training_stream_continues() -> None:
    class Noisy(Supervised):
        def validation_step(self, run: Run, batch: Any) -> Tensor:
            return torch.rand(())

    drawn: list[list[float]] = []
    for plugins in ([], [Cut(ValidationBatchEnd)]):
        trainer = Trainer([ValidationSchedule(Every(steps=2)), RNGCapture(), *plugins], device="cpu")
        drawn.append([])
        trainer.bus.on(BatchEnd, lambda run, event, to=drawn[-1]: to.append(torch.rand(()).item()))
        task = Noisy(nn.Linear(4, 2), nn.functional.cross_entropy)
        trainer.fit(task, class_batches(4), validation=class_batches(3), optimizer=torch.optim.SGD, epochs=1)
    assert drawn[0] == drawn[1]


def test_the_run_that_resumes_makes_up_for_it_first_and_then_equals_one_without_a_cut() -> None:
    schedules = ValidationSchedule(Every(steps=2)), SaveSchedule(Every(steps=2))
    whole = Keep()
    names, plain = fit(schedules[1], whole, schedule=schedules[0])
    cut = Keep()
    _, first = fit(schedules[1], cut, Stop(ValidationBatchEnd), schedule=schedules[0])
    assert (first.status, first.progress.steps, first.progress.validations) == ("stopped", 2, 0)
    (state,) = cut.states
    postponed = ["save", "validation"]
    assert (state["control"]["due"], state["control"]["postponed"]) == (postponed, postponed)

    resumed = Keep(state)
    again, second = fit(schedules[1], resumed, schedule=schedules[0])
    begin = [name for name in again if name != "should_stop"]
    assert begin[:11] == ["train_start", "checkpoint_loaded", *WHOLE, "save_point"]
    assert names.count("validation_end") == again.count("validation_end") == 2
    assert (second.metrics, second.progress.validations) == (plain.metrics, plain.progress.validations)
    assert [each["metrics"] for each in resumed.states] == [each["metrics"] for each in whole.states]


def test_one_at_an_epoch_s_last_batch_keeps_the_epoch_open_for_the_run_that_resumes() -> None:
    keep, save = Keep(), SaveSchedule(Every(steps=4))
    whole, _ = fit(keep, save, schedule=ValidationSchedule(Every(steps=4)))
    first, result = fit(keep, save, Stop(ValidationBatchEnd), schedule=ValidationSchedule(Every(steps=4)))
    assert (result.status, result.progress.epoch, result.progress.batch) == ("stopped", 0, 4)
    assert "epoch_end" not in first

    resumed, result = fit(Keep(keep.states[-1]), save, schedule=ValidationSchedule(Every(steps=4)))
    assert (result.status, result.progress.epoch, result.progress.batch) == ("completed", 1, 0)
    after = [
        name for name in resumed[resumed.index("validation_start") :] if name not in ("epoch_start", "should_stop")
    ]
    assert after == [name for name in whole[whole.index("validation_start") :] if name != "should_stop"]


def test_one_that_comes_at_the_very_end_stops_the_run_and_is_made_up_for_by_the_next() -> None:
    class SaveToo(Cut):
        @on(ValidationCut, lane=Lane.REPORT)
        def save(self, run: Run, event: ValidationCut) -> None:
            run.control.request_save("what there is")

    keep, schedule = Keep(), ValidationSchedule(Every(steps=99), at_end=True)
    names, result = fit(keep, SaveToo(ValidationBatchEnd), schedule=schedule)
    assert (result.status, result.reason, result.stopped_by) == ("stopped", "no time", "save_too")
    assert names[-4:] == ["validation_cut", "save_point", "train_end", "run_closed"]
    assert (result.progress.epoch, result.progress.steps) == (1, 4)
    names, result = fit(Keep(keep.states[0]), schedule=schedule)
    assert names == ["train_start", "checkpoint_loaded", *WHOLE, "should_stop", *END]
    assert result.status == "completed"


def test_in_a_test_and_in_a_validation_of_its_own_it_stops_the_run() -> None:
    for kind, event in (("test", TestBatchEnd), ("validate", ValidationBatchEnd)):
        trainer = Trainer([Cut(event, evaluated=2)], device="cpu")
        recorder = EventRecorder(trainer.bus)
        result = getattr(trainer, kind)(linear_classifier(), class_batches(3))
        assert (result.status, result.reason, result.stopped_by) == ("stopped", "no time", "cut")
        assert (result.progress.evaluated, result.metrics) == (2, {})
        assert recorder.trace[-2:] == ["validation_cut", "run_closed"]


def test_too_late_is_refused() -> None:
    def ask(run: Run, event: ValidationEnd) -> None:
        run.control.cut_validation("too late")

    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationEnd, ask)
    with pytest.raises(RuntimeError, match="handler of a running"):
        trainer.validate(linear_classifier(), class_batches(1))


def test_a_stop_ends_no_evaluation_and_the_result_says_so() -> None:
    class Stop(Plugin):
        @on(TestBatchEnd)
        def ask(self, run: Run, event: TestBatchEnd) -> None:
            run.control.stop("enough")

    result = Trainer([Stop()], device="cpu").test(linear_classifier(), class_batches(3))
    assert (result.status, result.progress.evaluated) == ("completed", 3)
    (said,) = result.warnings
    assert_facts(said, "stop", "enough", "test", "control.cut_validation")
