"""The ancestors' traps, one test each: what went wrong elsewhere must not go wrong here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import heliograph as h
import pytest
import torch
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, linear_classifier
from heliograph.tests.messages import assert_facts

fit = partial(kit.fit, train=class_batches(4), epochs=2)


def test_3_an_error_is_never_turned_into_a_return_value() -> None:
    class Broken(h.Plugin):
        @h.on(h.TrainStart)
        def fail(self, run: h.Run, event: h.TrainStart) -> None:
            raise LookupError("in the preparation")

    with pytest.raises(LookupError, match="in the preparation"):
        fit(Broken())


def test_5_a_vote_to_stop_does_not_spare_the_later_plugins_the_question() -> None:
    asked: list[str] = []

    class Ask(h.Plugin):
        asks = ("stop",)

        @h.on(h.ShouldStop)
        def vote(self, run: h.Run, event: h.ShouldStop) -> None:
            asked.append(self.name)
            run.control.stop("enough")

    result = fit(Ask().named("first"), Ask().named("second"))
    assert asked == ["first", "second"]
    assert (result.stopped_by, result.progress.steps) == ("first", 1)


def test_8_a_finished_run_that_is_resumed_does_no_extra_work(tmp_path: Path) -> None:
    plugins = [h.SaveSchedule(h.Every(epochs=1), at_end=True), h.Checkpoint(tmp_path, resume="auto")]
    first = fit(*plugins)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = fit(*plugins)
    assert_facts(second.reason, "nothing left", "epoch 2", "step 8")
    assert second.progress.batches == first.progress.batches == 8
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def test_12_steady_gains_below_the_threshold_add_up() -> None:
    stopper = h.EarlyStopping(patience=3, min_delta=0.1)
    values = iter([1.0, 0.95, 0.9, 0.85, 0.8])

    class Script(h.Plugin):
        @h.on(h.ValidationEnd, lane=h.Lane.MEASURE)
        def say(self, run: h.Run, event: h.ValidationEnd) -> None:
            event.metrics["validation/loss"] = next(values)

    result = fit(h.ValidationSchedule(h.Every(epochs=1)), Script(), stopper, validation=class_batches(1), epochs=5)
    assert (result.status, stopper.best) == ("completed", 0.85)


def test_13_intervals_can_change_on_resume(tmp_path: Path) -> None:
    saves: list[int] = []

    class Watch(h.Plugin):
        affects_training = False

        @h.on(h.CheckpointSaved)
        def watch(self, run: h.Run, event: h.CheckpointSaved) -> None:
            saves.append(run.progress.steps)

    fit(h.SaveSchedule(h.Every(steps=4)), h.Checkpoint(tmp_path), Watch(), epochs=1)
    fit(h.SaveSchedule(h.Every(steps=3)), h.Checkpoint(tmp_path, resume="auto"), Watch(), epochs=3)
    assert saves == [4, 4, 6, 9, 12, 12]  # at the end of an epoch that ends the run, too


def test_14_everything_is_cleaned_up_after_an_exception(tmp_path: Path) -> None:
    closed: list[str] = []

    class Held(h.Plugin):
        @h.on(h.StepEnd)
        def fail(self, run: h.Run, event: h.StepEnd) -> None:
            raise ZeroDivisionError

        def close(self) -> None:
            closed.append("file")

    with pytest.raises(ZeroDivisionError):
        fit(Held())
    assert closed == ["file"]


def test_16_early_stopping_without_validation_data_is_refused() -> None:
    with pytest.raises(ValueError, match="without validation data"):
        fit(h.EarlyStopping("validation/loss"))


def test_17_a_second_fit_and_a_test_on_one_trainer_find_what_the_first_left(tmp_path: Path) -> None:
    task = linear_classifier()
    trainer = h.Trainer([h.SaveSchedule(h.Every(epochs=1)), h.Checkpoint(tmp_path, resume="auto")], device="cpu")
    results = [fit(trainer, task=task, epochs=epochs) for epochs in (1, 2)]
    assert [result.progress.epoch for result in results] == [1, 2]
    assert [path.name for path in tmp_path.glob("*.pth")] == ["run_epoch_2_iter_8.pth"]
    assert trainer.test(task, class_batches(4)).status == "completed"


def test_19_the_tail_of_an_accumulation_is_stepped_with_its_weight_and_windows_end_with_the_epoch() -> None:
    windows: list[tuple[int, int]] = []

    class Watch(h.Plugin):
        @h.on(h.GradientsReady)
        def watch(self, run: h.Run, event: h.GradientsReady) -> None:
            windows.append((run.progress.epoch, run.stepping.window))

    result = fit(h.GradientAccumulation(3), Watch())
    assert windows == [(0, 3), (0, 1), (1, 3), (1, 1)]
    assert (result.progress.steps, result.progress.batches) == (4, 8)


def test_two_logs_at_one_step_are_no_missing_metric(tmp_path: Path) -> None:
    class LogAgain(h.Plugin):
        @h.on(h.EpochEnd)
        def ask(self, run: h.Run, event: h.EpochEnd) -> None:
            run.control.request_log("the epoch is over")

    stopper = h.EarlyStopping("train/loss", patience=9)
    saver = h.Checkpoint(tmp_path, keep_best=1, monitor="train/loss")
    schedules = [h.LogSchedule(h.Every(steps=1)), h.SaveSchedule(h.Every(steps=4)), LogAgain()]
    result = fit(*schedules, stopper, saver, h.TensorBoard(tmp_path / "board"))
    assert result.status == "completed"
    assert stopper.best == min(stopper.best or 0.0, result.metrics["train/loss"])
    assert result.best_checkpoint is not None


def test_hf_lp_2_a_token_weighs_the_same_in_any_micro_batch_and_window() -> None:
    """The last window is of two, and its batches hold 3 and 9 tokens."""

    class Tokens(h.Task):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = torch.nn.Linear(1, 1)

        def training_step(self, run: h.Run, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
            loss: torch.Tensor = self.model(batch).sum()
            return loss, len(batch)

    numbers = iter(range(30))
    tokens = [torch.tensor([[float(next(numbers))] for _ in range(count)]) for count in (1, 8, 2, 7, 3, 9)]
    task = Tokens()
    weight = float(task.model.weight.detach())
    result = fit(h.GradientAccumulation(4), task=task, train=tokens, optimizer=kit.sgd(1.0), epochs=1)
    assert (result.progress.tokens, result.progress.steps) == (30, 2)
    assert float(task.model.weight.detach()) == pytest.approx(weight - 8.5 - 23.5)  # the mean token of each window
