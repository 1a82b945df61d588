"""What rules read of a run, under the ancestors' names and under ours."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from heliograph import (
    At,
    Checkpoint,
    CheckpointSaved,
    EpochEnd,
    Event,
    Every,
    GradientNorm,
    LastBoundary,
    LearningRate,
    Log,
    LogSchedule,
    PredictEnd,
    Run,
    SavePoint,
    SaveSchedule,
    StepEnd,
    TestEnd,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
)
from heliograph.core.checkpoint.checks import check_plain
from heliograph.events import Lane, Progress
from heliograph_rules.base import RuleMetric
from heliograph_rules.errors import RuleError
from heliograph_rules.metrics.ancestors import EvalMetrics, Loss, Metrics, PerProcessState, TrainingState
from heliograph_rules.metrics.history import ancestor_name, under_both_names
from torch.optim.lr_scheduler import StepLR

Make = Callable[..., Any]


def place(batches_per_epoch: int | None = 4, **more: Any) -> Any:
    """Return what metrics read of a run, where it stands in its first batch of four."""
    reported: dict[str, Any] = {
        "progress": Progress(),
        "length": SimpleNamespace(batches_per_epoch=batches_per_epoch, max_steps=None, max_epochs=3),
        "checkpoints": SimpleNamespace(best=None),
        "engine": SimpleNamespace(rank=2, is_main=False, is_local_main=True),
        "metrics": {},
    }
    return SimpleNamespace(**reported | more)


def receive(trainer: Trainer, metric: RuleMetric) -> list[tuple[str, Any]]:
    """Let a metric receive its events, and be read at every step and epoch's end; return what came of it."""
    values: list[tuple[str, Any]] = []

    def read(run: Run, event: Event) -> None:
        values.append((event.name, metric.compute(run, event)))

    for kind in {*metric.events, StepEnd, EpochEnd}:
        trainer.bus.on(kind, read, lane=Lane.DECIDE if kind is SavePoint else Lane.PERSIST)
    return values


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("train/loss", "loss"),
        ("train/gradient_norm", "grad_norm"),
        ("train/learning_rate", "learning_rate"),
        ("train/generator_loss", "generator_loss"),
        ("train/gradient_norm/body", "gradient_norm/body"),
        ("validation/loss", "eval_loss"),
        ("validation/hard/accuracy", "eval_hard_accuracy"),
        ("test/loss", "test_loss"),
        ("test/hard/loss", "test_hard_loss"),
        ("lonely", "lonely"),
        ("train/", "train/"),
        ("mine/loss", "mine/loss"),
    ],
)
def test_names(ours: str, theirs: str) -> None:
    assert ancestor_name(ours) == theirs


def test_both_names_are_there_and_ours_is_exact_where_theirs_mean_two() -> None:
    metrics = under_both_names({"validation/a_b/c": np.float64(1.0), "validation/a/b_c": 2.0})
    assert metrics == {"eval_a_b_c": 2.0, "validation/a_b/c": 1.0, "validation/a/b_c": 2.0}
    assert {type(value) for value in metrics.values()} == {float}


def test_loss_is_the_newest_entry_of_the_log(task: Make, batches: Make, sgd: Any, losses: Any) -> None:
    mine = task()
    optimizer = sgd(list(mine.model.parameters()))
    trainer = Trainer([LogSchedule(Every(steps=2)), GradientNorm(), LearningRate("step")], device="cpu")
    seen, logs = losses(trainer), []
    trainer.bus.on(Log, lambda run, event: logs.append(dict(event.metrics)), lane=Lane.PERSIST)
    values = receive(trainer, Loss("training_loss"))
    trainer.fit(mine, batches(5), optimizer=optimizer, scheduler=StepLR(optimizer, 3, 0.5), epochs=1)

    assert [name for name, _ in values] == ["step_end", "step_end", "log", "step_end", "step_end", "log", "step_end", "epoch_end"]  # fmt: skip  # noqa: E501
    assert [value for _, value in values[:2]] == [None, None]
    expected = [
        {
            "loss": pytest.approx(sum(seen[start : start + 2]) / 2),
            "grad_norm": logs[number]["train/gradient_norm"],
            "learning_rate": rate,
            "epoch": epoch,
            "step": start + 2,
        }
        for number, (start, rate, epoch) in enumerate([(0, 0.1, 0.4), (2, 0.05, 0.8)])
    ]
    assert [value for _, value in values[2:5]] == [expected[0]] * 3
    assert [value for _, value in values[5:]] == [expected[1]] * 3
    assert all("epoch" not in metrics and "step" not in metrics for metrics in logs)  # the caller's are left alone


def test_a_log_without_batches_leaves_the_loss_as_it_was() -> None:
    metric, run = Loss("loss"), place()
    assert metric.compute(run, Log({"train/learning_rate": 0.1})) is None
    first = metric.compute(run, Log({"train/loss": 1.0}))
    run.progress.steps = 1
    assert metric.compute(run, Log({"train/learning_rate": 0.1})) is first
    assert metric.compute(run, Log({"train/generator_loss": 2.0})) == {"generator_loss": 2.0, "epoch": 0.0, "step": 1}


def test_the_training_state_is_never_stale(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))], device="cpu")
    values = receive(trainer, TrainingState("trainer_state"))
    trainer.fit(task(), batches(4), validation=batches(1, seed=1), optimizer=sgd, epochs=2)

    steps = [value for name, value in values if name == "step_end"]
    assert [value["epoch"] for value in steps] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
    assert [value["global_step"] for value in steps] == [value["step"] for value in steps] == list(range(1, 9))
    ends = [value for name, value in values if name == "epoch_end"]
    assert [(value["epoch"], value["global_step"], value["samples"], value["batches"]) for value in ends] == [
        (1.0, 4, 16, 4),
        (2.0, 8, 32, 8),
    ]
    last = values[-1][1]
    assert [(sorted(entry), entry["step"], entry["epoch"]) for entry in last["log_history"]] == [
        (["epoch", "loss", "step"], 2, 0.5),
        (["epoch", "loss", "step"], 4, 1.0),
        (["epoch", "eval_loss", "step"], 4, 1.0),
        (["epoch", "loss", "step"], 6, 1.5),
        (["epoch", "loss", "step"], 8, 2.0),
        (["epoch", "eval_loss", "step"], 8, 2.0),
    ]
    assert (last["max_steps"], last["num_train_epochs"], last["validations"]) == (None, 2, 2)
    assert (last["is_world_process_zero"], last["is_local_process_zero"], last["is_final"]) == (True, True, False)
    check_plain(last, "state")


def test_the_log_history_is_copied_where_something_is_logged_only() -> None:
    metric, run = TrainingState("state"), place()
    lists = []
    for step in range(1, 1003):
        run.progress.batch, run.progress.steps = step, step
        lists.append(metric.compute(run, Log({"train/loss": 1.0}))["log_history"])
        assert metric.compute(run, StepEnd())["log_history"] is lists[-1]
    assert [len(each) for each in lists] == [
        *range(1, 1001),
        1000,
        1000,
    ]  # bounded, and the old lists stay as they were
    assert (lists[-1][0]["step"], lists[-1][-1]["step"]) == (3, 1002)
    assert len(metric.compute(run, Log({"train/learning_rate": 1.0}))["log_history"]) == 1000
    assert lists[-1][-1] == {"loss": 1.0, "epoch": 1.0, "step": 1002}  # logged again in the same place


@pytest.mark.parametrize(("length", "epoch"), [(None, 1.0), (0, 1.0), (8, 1.375)])
def test_the_epoch_has_a_part_where_its_length_is_known(length: int | None, epoch: float) -> None:
    run = place(batches_per_epoch=length, progress=Progress(epoch=1, batch=2))
    assert TrainingState("state").compute(run, StepEnd())["epoch"] == epoch


@pytest.mark.parametrize("background", [False, True])
def test_a_save_after_the_end_is_final(
    task: Make, batches: Make, sgd: Any, tmp_path: Path, *, background: bool
) -> None:
    plugins = [SaveSchedule(At(steps=[1, 2]), at_end=True), Checkpoint(tmp_path, background=background)]
    trainer, metric = Trainer(plugins, device="cpu"), TrainingState("state")
    finals: list[dict[str, Any]] = []
    receive(trainer, metric)
    trainer.bus.on(CheckpointSaved, lambda run, event: finals.append(metric.compute(run, event)), lane=Lane.REPORT)
    trainer.fit(task(), batches(3), optimizer=sgd, epochs=1)
    assert [(state["global_step"], state["is_final"]) for state in finals][-1] == (3, True)
    assert [state["is_final"] for state in finals] == [False, False, True]


def test_eval_metrics_by_both_names_and_by_set(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([ValidationSchedule(Every(epochs=1))], device="cpu")
    reported: list[dict[str, float]] = []
    trainer.bus.on(ValidationEnd, lambda run, event: reported.append(event.metrics), lane=Lane.TRANSFORM)
    values = receive(trainer, EvalMetrics("evalmetric"))
    sets = {"easy": batches(1, seed=1), "hard": batches(1, seed=2)}
    trainer.fit(task(), batches(2), validation=sets, optimizer=sgd, epochs=2)

    assert [name for name, _ in values] == ["step_end", "step_end", "epoch_end", "validation_end"] * 2
    assert [value for _, value in values[:3]] == [None] * 3
    for metrics, value, epoch in ((reported[0], values[3][1], 1.0), (reported[1], values[7][1], 2.0)):
        assert sorted(metrics) == ["validation/easy/loss", "validation/hard/loss"]  # left alone
        assert value == metrics | {
            "eval_easy_loss": metrics["validation/easy/loss"],
            "eval_hard_loss": metrics["validation/hard/loss"],
            "epoch": epoch,
            "step": 2 * epoch,
        }
    assert values[6][1] == values[3][1]  # it stands until the next


@pytest.mark.parametrize("source", ["on_predict", "test_end"])
def test_the_metrics_of_a_test(task: Make, batches: Make, source: str) -> None:
    trainer = Trainer(device="cpu")
    values = receive(trainer, EvalMetrics("metrics", source_event=source))
    result = trainer.test(task(), batches(1))
    loss = result.metrics["test/loss"]
    assert values == [("test_end", {"test_loss": loss, "test/loss": loss, "epoch": 0.0, "step": 0})]
    metric = EvalMetrics("metrics", source_event=source)
    assert metric.events == ((TestEnd, PredictEnd) if source == "on_predict" else (TestEnd,))
    assert metric.compute(place(), ValidationEnd({"validation/loss": 1.0})) is None


@pytest.mark.parametrize("source", ["on_incorrect_event", "on_log", 3, None])
def test_another_source_event_is_refused_by_name(source: Any) -> None:
    with pytest.raises(ValueError, match=f"{source}") as caught:
        EvalMetrics("metrics", source_event=source)
    assert isinstance(caught.value, RuleError)
    assert "on_evaluate, on_predict" in str(caught.value)


def test_metrics_by_our_names(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LogSchedule(Every(steps=2)), ValidationSchedule(Every(epochs=1))], device="cpu")
    seen: list[Any] = []
    metric = Metrics("metrics")
    for kind in (StepEnd, Log, EpochEnd, ValidationEnd):
        trainer.bus.on(kind, lambda run, event: seen.append(metric.compute(run, event)), lane=Lane.PERSIST)
    result = trainer.fit(task(), batches(2), validation=batches(1), optimizer=sgd, epochs=1)
    train, validation = result.metrics["train/loss"], result.metrics["validation/loss"]
    assert seen == [None, None, {"train/loss": train}, {"train/loss": train}, {"train/loss": train, "validation/loss": validation}]  # fmt: skip  # noqa: E501


def test_the_rank() -> None:
    assert PerProcessState("state").compute(place(), StepEnd()) == {"rank": 2}


def test_a_final_save_is_still_one_when_it_is_loaded() -> None:
    metric, resumed = TrainingState("state"), TrainingState("state")
    for event in (LastBoundary(), SavePoint()):
        metric.compute(place(), event)
    resumed.load_state_dict(metric.state_dict())
    assert resumed.compute(place(), CheckpointSaved(Path("a"), False))["is_final"]
    assert not resumed.compute(place(), SavePoint())["is_final"]  # of the training that continues


@pytest.mark.parametrize("kind", [Loss, TrainingState, EvalMetrics])
def test_a_resumed_metric_continues(kind: type[RuleMetric]) -> None:
    run, before, after = place(), kind("metric"), kind("metric")
    for step in (1, 2):
        run.progress.batch, run.progress.steps = step, step
        before.compute(run, Log({"train/loss": 1.0 / step}))
        before.compute(run, ValidationEnd({"validation/loss": 2.0 / step}))
    check_plain(before.state_dict(), "state")
    saved = deepcopy(before.state_dict())
    after.load_state_dict(saved)
    run.progress.set_seconds(7.0)
    assert after.compute(run, EpochEnd(0)) == before.compute(run, EpochEnd(0)) is not None
    run.progress.steps = run.progress.batch = 3
    for metric in (before, after):
        metric.compute(run, Log({"train/loss": 0.25}))
    assert after.state_dict() == before.state_dict()
    untouched: RuleMetric = kind("metric")
    untouched.load_state_dict(saved)
    assert untouched.state_dict() == saved  # the one that continued did not write into it


def test_a_metric_without_compute_says_so() -> None:
    class Lazy(RuleMetric):
        pass

    assert Lazy("lazy").validate()
    assert Lazy("lazy").state_dict() == {}
    with pytest.raises(NotImplementedError, match=r"compute\(self, run, event\)"):
        Lazy("lazy").compute(place(), TrainStart())
