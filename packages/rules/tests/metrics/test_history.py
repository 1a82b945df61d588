"""The windows of HistoryBasedMetric."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from heliograph import EpochEnd, Event, Every, Log, LogSchedule, StepEnd, Trainer, ValidationEnd, ValidationSchedule
from heliograph.core.checkpoint.checks import check_plain
from heliograph.events import Lane, Progress
from heliograph_rules.errors import RuleTypeError
from heliograph_rules.metrics.history import HistoryBasedMetric
from hypothesis import given
from hypothesis import strategies as st

Make = Callable[..., Any]


def place(step: int = 0) -> Any:
    return SimpleNamespace(progress=Progress(batch=step, steps=step), length=SimpleNamespace(batches_per_epoch=10))


def log(metric: HistoryBasedMetric, step: int, **losses: float) -> Any:
    named = {f"train/{name}": value for name, value in losses.items()}
    return metric.compute(place(step), Log(named))


def validate(metric: HistoryBasedMetric, step: int, **metrics: float) -> Any:
    named = {f"validation/{name}": value for name, value in metrics.items()}
    return metric.compute(place(step), ValidationEnd(named))


def read(metric: HistoryBasedMetric, run: Any, event: Event) -> Any:
    return metric.compute(run, event)


def test_a_real_training(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=1)), ValidationSchedule(Every(epochs=1))], device="cpu")
    metric, values, losses, reported = HistoryBasedMetric("window", window_size=2), [], [], []
    trainer.bus.on(Log, lambda run, event: losses.append(event.metrics["train/loss"]))
    trainer.bus.on(ValidationEnd, lambda run, event: reported.append(dict(event.metrics)), lane=Lane.REPORT)
    for kind in (StepEnd, Log, ValidationEnd):
        trainer.bus.on(kind, lambda run, event: values.append(read(metric, run, event)), lane=Lane.PERSIST)
    trainer.fit(task(), batches(2), validation=batches(1, seed=1), optimizer=sgd, epochs=2)

    assert values[0] is None
    assert values[1] == {
        "window_size": 2,
        "training_loss": {"loss": losses[:1], "steps": [1], "global_step": [1], "epoch": [0.5]},
        "metrics": {},
    }
    assert values[4]["metrics"] == {
        "eval_loss": [reported[0]["validation/loss"]],
        "validation/loss": [reported[0]["validation/loss"]],
        "steps": [2],
        "global_step": [2],
        "epoch": [1.0],
    }
    assert values[-1]["training_loss"] == {
        "loss": losses[2:],
        "steps": [3, 4],
        "global_step": [3, 4],
        "epoch": [1.5, 2.0],
    }
    assert values[-1]["metrics"]["eval_loss"] == [metrics["validation/loss"] for metrics in reported]
    assert all(list(metrics) == ["validation/loss"] for metrics in reported)  # the caller's are left alone


@given(size=st.integers(-2, 6), losses=st.lists(st.sampled_from([0.5, 1.0, 2.0]), max_size=10))
def test_a_window_holds_the_newest(size: int, losses: list[float]) -> None:
    metric = HistoryBasedMetric("window", window_size=size)
    for step, loss in enumerate(losses, 1):
        log(metric, step, loss=loss)
        value = validate(metric, step, loss=-loss)
    if not losses:
        assert metric.compute(place(), StepEnd()) is None
        return
    kept = losses if size < 0 else losses[max(0, len(losses) - size) :]
    steps = list(range(len(losses) - len(kept) + 1, len(losses) + 1))
    assert value["window_size"] == size
    assert (value["training_loss"]["loss"], value["training_loss"]["steps"]) == (kept, steps)
    assert value["metrics"]["eval_loss"] == [-loss for loss in kept]
    assert value["metrics"]["global_step"] == value["metrics"]["steps"] == steps


def test_a_size_beyond_all_memory_is_as_good_as_none() -> None:
    metric = HistoryBasedMetric("window", window_size=10**30)
    assert log(metric, 1, loss=0.5)["training_loss"]["loss"] == [0.5]


def test_equal_losses_are_kept_and_the_same_log_is_received_once() -> None:
    metric = HistoryBasedMetric("window", window_size=-1)
    log(metric, 1, loss=0.5)
    log(metric, 2, loss=0.5)
    log(metric, 2, loss=0.5)
    assert log(metric, 3, learning_rate=0.1)["training_loss"]["steps"] == [1, 2]  # no batch was in that one
    validate(metric, 2, loss=1.0)
    assert validate(metric, 2, loss=1.0)["metrics"]["eval_loss"] == [1.0]
    assert validate(metric, 3, loss=1.0)["metrics"]["eval_loss"] == [1.0, 1.0]


def test_several_sets_and_metrics_that_come_later() -> None:
    metric = HistoryBasedMetric("window", window_size=2)
    metric.compute(place(1), ValidationEnd({"validation/easy/loss": 1.0, "validation/hard/loss": 2.0}))
    late = {"validation/easy/loss": 0.5, "validation/hard/loss": 1.5, "validation/hard/accuracy": 0.9}
    metrics = read(metric, place(2), ValidationEnd(late))["metrics"]
    assert (metrics["eval_easy_loss"], metrics["eval_hard_loss"]) == ([1.0, 0.5], [2.0, 1.5])
    assert metrics["eval_hard_accuracy"] == metrics["validation/hard/accuracy"] == [0.9]
    assert metrics["steps"] == [1, 2]


def test_the_losses_of_several_optimizers() -> None:
    value = log(HistoryBasedMetric("window"), 1, generator_loss=1.0, critic_loss=2.0)["training_loss"]
    assert value == {"loss": [], "generator_loss": [1.0], "critic_loss": [2.0], "steps": [1], "global_step": [1], "epoch": [0.1]}  # fmt: skip  # noqa: E501


def test_a_value_stays_as_it_was_read() -> None:
    metric = HistoryBasedMetric("window", window_size=3)
    first = log(metric, 1, loss=1.0)
    before = deepcopy(first)
    assert metric.compute(place(1), StepEnd()) is first  # nothing is copied at a step
    log(metric, 2, loss=2.0)
    assert first == before


@pytest.mark.parametrize("smaller", [False, True])
def test_a_resumed_window_continues(*, smaller: bool) -> None:
    metric = HistoryBasedMetric("window", window_size=3)
    for step in (1, 2, 3, 4):
        log(metric, step, loss=float(step))
        validate(metric, step, loss=10.0 + step)
    check_plain(metric.state_dict(), "state")
    saved = deepcopy(metric.state_dict())
    resumed = HistoryBasedMetric("window", window_size=2 if smaller else 3)
    resumed.load_state_dict(saved)
    assert log(resumed, 4, loss=4.0)["training_loss"]["loss"] == [2.0, 3.0, 4.0][smaller:]  # received before the resume
    assert log(resumed, 5, loss=5.0)["training_loss"]["loss"] == [3.0, 4.0, 5.0][smaller:]
    assert read(resumed, place(5), EpochEnd(0))["metrics"]["eval_loss"] == [12.0, 13.0, 14.0][smaller:]
    assert saved["training_loss"]["loss"] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("size", ["5", 2.5, True, None])
def test_a_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(RuleTypeError, match="window_size must"):
        HistoryBasedMetric("window", window_size=size)
