"""NaNGuard: raise, skip, stop; alone and inside an accumulation window."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Checkpoint,
    EpochEnd,
    EpochMeans,
    Every,
    GradientAccumulation,
    Lane,
    LogSchedule,
    NaNGuard,
    RNGCapture,
    Run,
    RunResult,
    StepEnd,
    Supervised,
    Trainer,
    TrainStart,
)
from heliograph.tests.messages import assert_facts

Make = Callable[..., Any]


def spoil(trainer: Trainer, *places: int, value: float = math.nan) -> None:
    """Make the inputs of some batches, counted over all epochs, no numbers."""

    def replace(run: Run, event: BatchStart) -> None:
        if run.progress.batches in places:
            run.batch = (torch.full_like(run.batch[0], value), run.batch[1])

    trainer.bus.on(BatchStart, replace, lane=Lane.TRANSFORM)


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, r"(inf|nan)")])
def test_raise(task: Make, batches: Make, sgd: Any, weights: Any, value: float, word: str) -> None:
    mine, theirs = task(), task()
    trainer = Trainer([NaNGuard()], device="cpu")
    spoil(trainer, 2, value=value)
    with pytest.raises(FloatingPointError, match=f"{word} at step 2:"):
        trainer.fit(mine, batches(), optimizer=sgd, epochs=1)
    Trainer(device="cpu").fit(theirs, batches()[:2], optimizer=sgd, epochs=1)

    assert all(map(torch.equal, weights(mine), weights(theirs)))


def test_skip_drops_the_step_and_continues(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    data, mine, theirs = batches(), task(), task()
    trainer = Trainer([NaNGuard("skip")], device="cpu")
    spoil(trainer, 1, 3)
    result = trainer.fit(mine, data, optimizer=sgd, epochs=1)
    Trainer(device="cpu").fit(theirs, [data[0], data[2], data[4]], optimizer=sgd, epochs=1)

    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert (result.progress.steps, result.progress.skipped_steps, result.status) == (3, 2, "completed")
    assert [str(request.reason) for request in result.history if request.verb == "skip_step"] == ["the loss is nan"] * 2


@pytest.mark.parametrize("place", [2, 3, 4])
def test_skip_inside_an_accumulation_window_drops_the_whole_window(
    task: Make, batches: Make, sgd: Any, weights: Any, place: int
) -> None:
    data, mine, theirs = batches(6), task(), task()
    trainer = Trainer([NaNGuard("skip"), GradientAccumulation(3)], device="cpu")
    spoil(trainer, place)
    result = trainer.fit(mine, data, optimizer=sgd, epochs=1)
    good = data[3:] if place < 3 else data[:3]
    Trainer([GradientAccumulation(3)], device="cpu").fit(theirs, good, optimizer=sgd, epochs=1)

    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert (result.progress.steps, result.progress.skipped_steps) == (1, 1)


@pytest.mark.parametrize("skipped", [1, 2])
def test_a_bad_micro_batch_is_seen_past_a_skipped_batch(task: Make, batches: Make, sgd: Any, skipped: int) -> None:
    trainer = Trainer([NaNGuard("skip"), GradientAccumulation(3)], device="cpu")
    spoil(trainer, 0)

    def leave_out(run: Run, event: BatchStart) -> None:
        if run.progress.batch == skipped:
            run.control.skip_batch("the test says so")

    trainer.bus.on(BatchStart, leave_out)
    result = trainer.fit(task(), batches(6), optimizer=sgd, epochs=1)

    assert (result.progress.steps, result.progress.skipped_steps) == (1, 1)


def test_a_window_s_losses_do_not_reach_the_next_window(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard("skip"), GradientAccumulation(2)], device="cpu")
    spoil(trainer, 0, 1)
    stepped: list[int] = []
    trainer.bus.on(StepEnd, lambda run, event: stepped.append(run.progress.batch))
    trainer.fit(task(), batches(5), optimizer=sgd, epochs=1)

    assert stepped == [3, 4]


def test_raise_inside_an_accumulation_window_names_the_bad_one(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard(), GradientAccumulation(3)], device="cpu")
    spoil(trainer, 3)
    seen: list[int] = []
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.progress.batch))
    with pytest.raises(FloatingPointError, match="nan at step 1"):
        trainer.fit(task(), batches(6), optimizer=sgd, epochs=1)

    assert seen == [1, 2, 3, 4, 5]


def test_stop(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    data, mine, theirs = batches(), task(), task()
    trainer = Trainer([NaNGuard("stop")], device="cpu")
    spoil(trainer, 2)
    result = trainer.fit(mine, data, optimizer=sgd, epochs=1)
    Trainer(device="cpu").fit(theirs, data[:2], optimizer=sgd, epochs=1)

    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert (result.status, result.stopped_by) == ("stopped", "nan_guard")
    assert_facts(result.reason, "loss is nan", "step 2")
    assert (result.progress.steps, result.progress.skipped_steps, result.progress.batches) == (2, 1, 3)


def test_max_skips_in_a_row(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard("skip", max_skips=2)], device="cpu")
    spoil(trainer, 0, 1, 3, 4)
    assert trainer.fit(task(), batches(), optimizer=sgd, epochs=1).progress.skipped_steps == 4

    trainer = Trainer([NaNGuard("skip", max_skips=2)], device="cpu")
    spoil(trainer, 1, 2, 3)
    with pytest.raises(FloatingPointError, match="step 1, 3 windows"):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=1)


def test_skips_in_a_row_are_counted_across_a_resume(task: Make, batches: Make, sgd: Any) -> None:
    saved: dict[str, Any] = {}
    trainer = Trainer([NaNGuard("skip", max_skips=3)], device="cpu")
    spoil(trainer, 1, 2)
    trainer.bus.on(EpochEnd, lambda run, event: saved.update(deepcopy(run.state_dict())))
    trainer.fit(task(), batches(3), optimizer=sgd, epochs=1)
    assert saved["plugins"]["nan_guard"] == {"skips": {"optimizer": 2}, "stop_reason": ""}

    trainer = Trainer([NaNGuard("skip", max_skips=3)], device="cpu")
    spoil(trainer, 3, 4)
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    with pytest.raises(FloatingPointError, match="4 windows"):
        trainer.fit(task(), batches(3), optimizer=sgd, epochs=2)


def test_a_second_fit_counts_again(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard("skip", max_skips=2)], device="cpu")
    spoil(trainer, 3, 4)
    for _ in range(2):
        assert trainer.fit(task(), batches(), optimizer=sgd, epochs=1).progress.skipped_steps == 2
    assert trainer.test(task(), batches(1)).status == "completed"


def test_a_good_run_is_not_touched(task: Make, batches: Make, sgd: Any, weights: Any) -> None:
    mine, theirs = task(), task()
    result = Trainer([NaNGuard("skip")], device="cpu").fit(mine, batches(), optimizer=sgd, epochs=2)
    Trainer(device="cpu").fit(theirs, batches(), optimizer=sgd, epochs=2)

    assert all(map(torch.equal, weights(mine), weights(theirs)))
    assert len(result.history) == 0


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="'raise', 'skip' or 'stop',"):
        NaNGuard("ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="least 1; got 0"):
        NaNGuard("skip", max_skips=0)


def test_stop_can_end_an_endless_run(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard("stop")], device="cpu")
    spoil(trainer, 7)

    assert trainer.fit(task(), batches(), optimizer=sgd).progress.steps == 7


@pytest.mark.parametrize(("action", "status", "steps"), [("stop", "stopped", 1), ("skip", "completed", 4)])
def test_a_run_that_was_stopped_is_stopped_again_unless_the_action_was_changed(
    task: Make, batches: Make, sgd: Any, action: Any, status: str, steps: int
) -> None:
    saved: dict[str, Any] = {}
    trainer = Trainer([NaNGuard("stop")], device="cpu")
    spoil(trainer, 1)
    trainer.bus.on(BatchEnd, lambda run, event: saved.update(deepcopy(run.state_dict())), lane=Lane.REPORT)
    trainer.fit(task(), batches(), optimizer=sgd, epochs=1)

    trainer = Trainer([NaNGuard(action)], device="cpu")
    trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    result = trainer.fit(task(), batches(), optimizer=sgd, epochs=1)

    assert (result.status, result.progress.steps) == (status, steps)


def loss_rows(result: RunResult) -> list[tuple[float, float]]:
    """Return the logged losses with their steps."""
    return [(row["step"], row["train/loss"]) for row in result.log_history if "train/loss" in row]


@pytest.mark.parametrize("size", [1, 2])
def test_losses_of_skipped_windows_are_in_no_mean(task: Make, batches: Make, sgd: Any, size: int) -> None:
    """What is logged and returned is that of a training without these batches."""
    data = [*batches(), *batches(), batches()[0], batches()[1]]  # twelve
    plugins = [GradientAccumulation(size), LogSchedule(steps=2), EpochMeans()]
    trainer = Trainer([NaNGuard("skip"), *plugins], device="cpu")
    bad = 5 // size * size
    spoil(trainer, bad + size - 1)
    result = trainer.fit(task(), data, optimizer=sgd, epochs=1)
    rest = [*data[:bad], *data[bad + size :]]
    expected = Trainer(deepcopy(plugins), device="cpu").fit(task(), rest, optimizer=sgd, epochs=1)

    assert loss_rows(result) == loss_rows(expected)
    assert result.means == expected.means
    assert result.metrics == expected.metrics
    assert not result.warnings


def test_a_sum_with_its_count_of_a_skipped_window_is_in_no_mean(task: Make, batches: Make, sgd: Any) -> None:
    class Sums(Supervised):
        def training_step(self, run: Run, batch: Any) -> Any:
            return super().training_step(run, batch) * 8, 8

    means = []
    for places, data in (((2,), batches()), ((), [*batches()[:2], *batches()[3:]])):
        trainer = Trainer([NaNGuard("skip"), LogSchedule(steps=2)], device="cpu")
        spoil(trainer, *places)
        own = task()
        means.append(trainer.fit(Sums(own.model, own.loss_fn), data, optimizer=sgd, epochs=1).means)

    assert means[0] == means[1]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_resumed_run_leaves_out_the_same_losses(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, cut: int
) -> None:
    def fit(steps: int, folder: Path, resume: str | None) -> RunResult:
        saves = Checkpoint(folder, every=Every(steps=1), resume=resume)
        trainer = Trainer([NaNGuard("skip"), RNGCapture(), LogSchedule(steps=3), EpochMeans(), saves], device="cpu")
        spoil(trainer, 1, 3)
        return trainer.fit(task(), batches() * 2, optimizer=sgd, steps=steps)

    whole = fit(8, tmp_path / "whole", None)
    fit(cut, tmp_path / "cut", None)
    resumed = fit(8, tmp_path / "cut", "auto")

    assert (loss_rows(resumed), resumed.means) == (loss_rows(whole), whole.means)
    assert math.isfinite(whole.means["train/loss"])


def test_a_run_that_was_stopped_before_the_bad_step_is_not_lost(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([NaNGuard("stop"), LogSchedule(steps=1)], device="cpu")
    spoil(trainer, 2)
    result = trainer.fit(task(), batches(), optimizer=sgd, epochs=1)

    assert (result.status, result.progress.steps, result.warnings) == ("stopped", 2, ())
    assert math.isfinite(result.means["train/loss"])
