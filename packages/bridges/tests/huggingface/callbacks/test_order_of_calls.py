"""A callback is called here in the order in which the Trainer calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.packages.bridges.tests.huggingface.callbacks.training import Call, Tracer, train_here, train_there
from transformers import EarlyStoppingCallback, TrainerCallback

BY_THE_CLOCK = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
ONE_EPOCH = """
on_train_begin 0 0.0
on_epoch_begin 0 0.0
on_step_begin 0 0.0
on_substep_end 0 0.0
on_pre_optimizer_step 0 0.0
on_optimizer_step 0 0.0
on_step_end 1 0.4
on_step_begin 1 0.4
on_substep_end 1 0.4
on_pre_optimizer_step 1 0.4
on_optimizer_step 1 0.4
on_step_end 2 0.8
on_log 2 0.8 epoch grad_norm learning_rate loss
on_step_begin 2 0.8
on_pre_optimizer_step 2 0.8
on_optimizer_step 2 0.8
on_step_end 3 1.0
on_prediction_step 3 1.0
on_prediction_step 3 1.0
on_log 3 1.0 epoch eval_loss
on_evaluate 3 1.0 epoch eval_loss
on_epoch_end 3 1.0
on_save 3 1.0
on_train_end 3 1.0
"""


def alike(calls: list[Call]) -> list[str]:
    """Return calls as lines, without what is known to differ: see "What differs" in docs/packages/bridges.md."""
    kept = [call for call in calls if call[0] != "on_init_end" and "train_runtime" not in call]
    return [" ".join(str(part) for part in call if part not in BY_THE_CLOCK) for call in kept]


def both(folder: Path, there: dict[str, Any], plugins: list[Any], callbacks: Any = tuple, **here: Any) -> list[Any]:
    """Return the calls in the Trainer and here, and the result here."""
    theirs, ours = Tracer(), Tracer()
    train_there(folder / "there", [theirs, *callbacks()], **there)
    result = train_here(ours, *plugins, *callbacks(), **here)
    return [theirs.calls, ours.calls, result]


def test_accumulation_evaluation_by_steps_saves_by_epochs(tmp_path: Path) -> None:
    there = {
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 2,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "epoch",
    }
    plugins = [
        h.GradientAccumulation(2),
        h.GradientNorm(),
        h.LogSchedule(steps=2),
        h.ValidationSchedule(steps=3),
        h.Checkpoint(tmp_path / "here", every=h.Every(epochs=1)),
    ]
    theirs, ours, _ = both(tmp_path, there, plugins, epochs=1)
    assert alike(theirs) == ONE_EPOCH.strip().splitlines()
    assert alike(ours) == ONE_EPOCH.strip().splitlines()


def test_two_epochs_that_are_evaluated_and_logged_at_every_step(tmp_path: Path) -> None:
    there = {"num_train_epochs": 2, "logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "epoch"}
    plugins = [h.GradientNorm(), h.LogSchedule(steps=1), h.ValidationSchedule(epochs=1, at_end=False)]
    theirs, ours, _ = both(tmp_path, there, plugins, epochs=2)
    assert alike(ours) == alike(theirs)
    assert len(ours) > 60


def test_early_stopping_stops_at_the_same_step(tmp_path: Path) -> None:
    def early() -> list[Any]:
        return [EarlyStoppingCallback(2)]

    there = {"num_train_epochs": 9, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
    plugins = [h.ValidationSchedule(steps=2, at_end=False)]
    theirs, ours, result = both(tmp_path, there, plugins, early, epochs=9)
    assert (result.stopped_by, result.progress.steps) == ("early_stopping_callback", 6)
    # The Trainer ends an epoch that is left, here it stays open for a resumed run.
    assert [line for line in alike(theirs) if line != "on_epoch_end 6 1.2"] == alike(ours)


def test_the_known_differences(tmp_path: Path) -> None:
    """Each is a row of the table in docs/packages/bridges.md."""
    there = {"max_steps": 7, "eval_strategy": "epoch"}
    theirs, ours, _ = both(tmp_path, there, [h.ValidationSchedule(epochs=1, at_end=False)], steps=7)
    assert ("on_init_end", 0, 0) not in theirs  # the callback was added after the Trainer was made
    assert ours[0] == ("on_init_end", 0, 0.0)
    assert alike(theirs)[:-6] == alike(ours)[:-1]
    last = "7 1.4"
    assert alike(theirs)[-6:] == [
        f"on_epoch_end {last}",
        f"on_prediction_step {last}",
        f"on_prediction_step {last}",
        f"on_log {last} epoch eval_loss",
        f"on_evaluate {last} epoch eval_loss",
        f"on_train_end {last}",
    ]
    summary = next(call for call in theirs if "train_runtime" in call)
    assert summary[3:] == (
        "epoch",
        "total_flos",
        "train_loss",
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
    )


STEPS: dict[str, Any] = {
    "num_train_epochs": 2,
    "logging_strategy": "steps",
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
}


def test_the_norm_that_is_logged_is_that_of_the_last_step(tmp_path: Path) -> None:
    there = STEPS | {"logging_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    theirs, ours = Norms(), Norms()
    train_there(tmp_path, [theirs], **there)
    train_here(h.GradientNorm(), h.LogSchedule(steps=3), ours, epochs=2)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    clipped = Norms()
    train_here(h.GradientClipping(1000.0), h.LogSchedule(steps=3), clipped, epochs=2)
    assert clipped.norms == ours.norms
    assert len(ours.norms) == 3


class Norms(TrainerCallback):
    """Keeps the gradient norms of the logs."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


@pytest.mark.parametrize("count", [1, 2])
def test_losses_and_evaluations_are_those_of_the_trainer(tmp_path: Path, count: int) -> None:
    """Where all windows are whole: the Trainer's mean is over steps, that of this package over samples."""
    there = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": count,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = train_there(tmp_path, [], train=4, **there)
    keeper = HistoryKeeper()
    plugins = [h.GradientAccumulation(count), h.LogSchedule(steps=2), h.ValidationSchedule(steps=2, at_end=False)]
    train_here(*plugins, keeper, train=4, epochs=2)
    ours = [{name: row[name] for name in row if name not in BY_THE_CLOCK} for row in keeper.history]
    names = [set(row) for row in ours]
    rows = zip(trainer.state.log_history[:-1], names, strict=True)  # the last one is of the whole training
    theirs = [{name: row[name] for name in row if name in own} for row, own in rows]
    assert ours == [pytest.approx(row, rel=1e-5) for row in theirs]
    assert len(ours) == 16 // count // 2 * 2 // 2
    assert {"loss", "learning_rate", "epoch", "step"} in names


class HistoryKeeper(EarlyStoppingCallback):
    """Keeps the history of the state, and never stops."""

    def __init__(self) -> None:
        super().__init__(99)
        self.history: list[dict[str, float]] = []

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.history = list(state.log_history)
