"""`run.roll_back`: from any event, in any loop, back to a saved state and on from there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Event,
    GradientAccumulation,
    GradientsReady,
    Lane,
    Log,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    ShouldStop,
    StepEnd,
    Supervised,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationStart,
    on,
)
from heliograph.tests import kit
from heliograph.tests.kit import Batch, EventRecorder, adam, class_batches, counters, go_through
from torch import Tensor, nn

WITHIN: list[Any] = [EpochStart, BatchStart, GradientsReady, StepEnd, BatchEnd, Log, ValidationStart]
WITHIN += [ValidationBatchEnd, ValidationEnd, SavePoint, ShouldStop, EpochEnd]


def make_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), nn.functional.cross_entropy)


class Asker(Plugin):
    """Asks for everything after every batch and every epoch."""

    asks = ("validation", "save", "log", "stop")

    @on(BatchEnd, EpochEnd, lane=Lane.TRANSFORM)
    def ask(self, run: Run, event: BatchEnd | EpochEnd) -> None:
        run.control.request_log("test")
        run.control.request_validation("test")
        run.control.request_save("test")


class Back(Plugin):
    """Keeps the state of one save point, and goes back to it once, from the first such event at or after some batch."""

    def __init__(self, kind: type[Event] | None, *, saved_at: int = 2, at: int = 4) -> None:
        self.kind, self.saved_at, self.at = kind, saved_at, at
        self.saved: dict[str, Any] = {}
        self.origins: list[Any] = []
        self.went = False

    @on(*WITHIN)
    def act(self, run: Run, event: Event) -> None:
        if isinstance(event, SavePoint) and run.progress.batches == self.saved_at and not self.saved:
            self.saved = deepcopy(run.state_dict())
        if self.kind is not None and isinstance(event, self.kind) and run.progress.batches >= self.at and not self.went:
            self.went = True
            run.roll_back(self.saved)

    @on(CheckpointLoaded)
    def loaded(self, run: Run, event: CheckpointLoaded) -> None:
        self.origins.append(run.origin)


def fit(*plugins: Any, epochs: int = 3, own_loop: bool = False) -> tuple[list[str], RunResult, list[Tensor]]:
    return fit_on(class_batches(3), [Asker(), RNGCapture(), *plugins], epochs=epochs, own_loop=own_loop)


def fit_on(
    loader: Any, plugins: list[Any], *, epochs: int, own_loop: bool = False
) -> tuple[list[str], RunResult, list[Tensor]]:
    trainer, task = Trainer(plugins, device="cpu"), make_task()
    recorder = EventRecorder(trainer.bus)
    options: Any = {
        "validation": class_batches(2),
        "optimizer": adam(0.1),
        "epochs": epochs,
    }
    if own_loop:
        result = go_through(trainer.run(task, loader, **options)).result
    else:
        result = trainer.fit(task, loader, **options)
    return recorder.trace, result, [each.detach().clone() for each in task.model.state_dict().values()]


@pytest.mark.sample(6)
@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("kind", WITHIN)
def test_a_run_that_went_back_ends_like_one_that_did_not(kind: type[Event], own_loop: bool) -> None:
    _, plain, weights = fit(Back(None))
    back = Back(kind)
    names, result, rolled = fit(back, own_loop=own_loop)
    assert back.went
    assert names.count("checkpoint_loaded") == 1
    assert counters(result) == counters(plain)
    assert result.metrics == plain.metrics
    assert all(map(torch.equal, rolled, weights))
    assert result.status == "completed"


def test_the_epoch_that_is_given_up_has_no_end_and_nothing_is_served_in_it_any_more() -> None:
    names, result, _ = fit(Back(BatchEnd, saved_at=1, at=2), epochs=1)
    batch = ["batch_start", "forward_end", "backward_end", "gradients_ready", "step_end", "batch_end"]
    served = ["log", "validation_start"] + ["validation_batch_start", "validation_batch_end"] * 2
    served += ["validation_end", "save_point", "should_stop"]
    back = ["should_stop", "checkpoint_loaded", "should_stop", "epoch_start"]
    rest = [*batch, *served, *batch, *served, "epoch_end", *served, "last_boundary", "train_end", "run_closed"]
    assert names == ["train_start", "epoch_start", *batch, *served, *batch, *back, *rest]
    (asked,) = [each for each in result.history if each.verb == "roll_back"]
    assert (asked.by, asked.reason, asked.batch) == ("back", "to a saved state", 2)


def test_a_return_across_an_epoch_and_from_the_last_batch_of_the_run() -> None:
    _, plain, weights = fit(Back(None), epochs=2)
    names, result, rolled = fit(Back(EpochEnd, saved_at=1, at=6), epochs=2)
    assert names.count("epoch_end") == 4
    assert counters(result) == counters(plain)
    assert all(map(torch.equal, rolled, weights))


def test_within_a_window_its_gradients_are_dropped() -> None:
    plugin = Back(BatchEnd, saved_at=3, at=5)
    trace, result, rolled = fit(plugin, GradientAccumulation(3))
    _, plain, weights = fit(Back(None), GradientAccumulation(3))
    assert trace.count("batch_start") == 9 + 2
    assert counters(result) == counters(plain)
    assert (result.progress.steps, result.progress.skipped_steps) == (3, 0)
    assert all(map(torch.equal, rolled, weights))


class Short:
    """Yields three batches and promises four, so the last window is closed with its epoch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Batch]:
        return iter(class_batches(3))


def test_a_return_from_the_window_that_the_epoch_closes_reports_no_end() -> None:
    def train(back: Back) -> tuple[list[str], RunResult, list[Tensor]]:
        plugins = [Asker(), RNGCapture(), GradientAccumulation(2), back]
        return fit_on(Short(), plugins, epochs=2)

    back = Back(GradientsReady, saved_at=2, at=2)
    names, result, rolled = train(back)
    _, plain, weights = train(Back(None))
    assert back.went
    assert any("ended after 3 batches," in line for line in result.warnings)
    assert names.count("epoch_end") == 2
    assert names.index("checkpoint_loaded") < names.index("epoch_end")
    assert counters(result) == counters(plain)
    assert all(map(torch.equal, rolled, weights))


def test_what_is_under_way_is_settled_before_the_return() -> None:
    class Works(Plugin):
        def __init__(self) -> None:
            self.received: list[str] = []

        @on(TrainStart)
        def begin(self, run: Run, event: TrainStart) -> None:
            for _ in range(2):  # the second time does nothing
                run.hooks.when_settling(self.finish)

        @on(CheckpointLoaded)
        def loaded(self, run: Run, event: CheckpointLoaded) -> None:
            self.received.append("loaded")

        def finish(self) -> None:
            self.received.append("settled")

    works = Works()
    fit(Back(BatchEnd), works)
    assert works.received == ["settled", "loaded"]


def test_the_origin_is_renewed_and_filters_go_by_it() -> None:
    back = Back(BatchEnd)
    fit(back)
    (origin,) = back.origins
    assert origin.batches == 2


def test_a_stop_survives_the_return_and_other_requests_do_not() -> None:
    class StopToo(Plugin):
        @on(BatchEnd, lane=Lane.REPORT)
        def stop(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 4:
                run.control.stop("enough")
                run.control.end_epoch("of this one")

    _, result, _ = fit(Back(BatchEnd), StopToo())
    assert (result.status, result.stopped_by, result.progress.batches) == ("stopped", "stop_too", 2)
    assert result.progress.epoch == 0


@pytest.fixture
def low_limit() -> Iterator[int]:
    """Let Python's stack grow by 300 frames only."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 300)
    yield 300
    sys.setrecursionlimit(limit)


def test_going_back_again_right_from_the_return_needs_no_deeper_stack(low_limit: int) -> None:
    class Again(Plugin):
        def __init__(self) -> None:
            self.times = 0

        @on(CheckpointLoaded)
        def again(self, run: Run, event: CheckpointLoaded) -> None:
            self.times += 1
            if self.times < low_limit + 50:
                run.roll_back(back.saved)

    again, back = Again(), Back(BatchEnd)
    _, result, _ = fit(back, again)
    assert (again.times, result.progress.epoch) == (low_limit + 50, 3)


def test_an_own_loop_may_go_back_from_its_body_and_break_off() -> None:
    trainer, task, went = Trainer(device="cpu"), make_task(), False
    saved: list[dict[str, Any]] = []
    with trainer.run(task, class_batches(4), optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=2) as run:
        for epoch in run.epochs():
            for batch in run.batches():
                run.step(task.training_step(run, batch))
                if run.progress.steps == 6 and not went:
                    went = True
                    run.roll_back(saved[0])
                    break
            if epoch == 0 and not saved:
                saved.append(deepcopy(run.state_dict()))
    assert went
    assert (run.result.progress.epoch, run.result.progress.steps) == (2, 8)
    assert run.result.status == "completed"


def test_a_loop_that_is_left_although_it_asked_to_go_back_is_stopped() -> None:
    trainer, task = Trainer(device="cpu"), make_task()
    with trainer.run(task, class_batches(4), optimizer=torch.optim.SGD(task.model.parameters(), 0.1), epochs=2) as run:
        for _ in run.epochs():
            run.roll_back(run.state_dict())
            break
    assert (run.result.status, run.result.stopped_by) == ("stopped", "the caller")


@pytest.mark.parametrize("kind", [TrainStart, TrainEnd])
def test_before_and_after_the_training_it_is_refused(kind: type[Event]) -> None:
    def ask(run: Run, event: Any) -> None:
        run.roll_back(run.state_dict())

    trainer = Trainer(device="cpu")
    trainer.bus.on(kind, ask)
    with pytest.raises(RuntimeError, match=r"At TrainStart, call run\.resume"):
        kit.fit(trainer, train=class_batches(1))


def test_in_a_test_it_is_refused() -> None:
    def ask(run: Run, event: ValidationEnd) -> None:
        run.roll_back({})

    trainer = Trainer(device="cpu")
    trainer.bus.on(ValidationEnd, ask)
    with pytest.raises(RuntimeError, match="needs a started training"):
        trainer.validate(make_task(), class_batches(1))


def test_a_state_of_another_kind_fails_the_run() -> None:
    check: Callable[[Run, BatchEnd], None] = lambda run, event: run.roll_back({"schema": 99})  # noqa: E731
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, check)
    with pytest.raises(ValueError, match="schema 99"):
        kit.fit(trainer, train=class_batches(1))
