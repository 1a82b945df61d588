"""A watched metric: its name and direction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    BatchEnd,
    EarlyStopping,
    EpochStart,
    Every,
    Lane,
    Log,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Supervised,
    Task,
    Trainer,
    TrainStart,
    ValidationEnd,
    ValidationSchedule,
    accuracy,
    on,
)
from heliograph.core.checkpoint.storage import read_manifest
from heliograph.core.metrics.monitor import Monitor
from heliograph.core.task import Losses
from heliograph.tests import kit
from heliograph.tests.messages import assert_facts
from torch import nn


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("val_loss", "validation/loss"),
        ("eval_accuracy", "validation/accuracy"),
        ("valid/f1", "validation/f1"),
        ("train_loss", "train/loss"),
        ("training_top_5", "train/top_5"),
        ("accuracy", "validation/accuracy"),
        ("valuation", "validation/valuation"),
        ("mine/loss", "validation/loss"),
        ("", "validation/loss"),
        (3, "validation/loss"),
    ],
)
def test_a_name_of_another_framework_is_refused_with_the_one_here(given: Any, here: str) -> None:
    with pytest.raises(ValueError, match=f", as in '{here}', got {given!r}\\.$"):
        Monitor(given, "max")


@pytest.mark.parametrize(
    ("mode", "delta", "value", "best", "better"),
    [
        ("min", 0.0, 1.0, None, True),
        ("min", 0.0, 0.9, 1.0, True),
        ("min", 0.0, 1.0, 1.0, False),
        ("min", 0.0, 1.1, 1.0, False),
        ("min", 0.5, 0.5, 1.0, False),
        ("min", 0.5, 0.4, 1.0, True),
        ("max", 0.0, 1.1, 1.0, True),
        ("max", 0.0, 1.0, 1.0, False),
        ("max", 0.5, 1.5, 1.0, False),
        ("max", 0.5, 1.6, 1.0, True),
        ("min", 0.0, math.nan, None, False),
        ("max", 0.0, math.nan, 1.0, False),
        ("min", 0.0, math.inf, None, True),
        ("min", 0.0, -math.inf, 1.0, True),
        ("min", 0.0, 5.0, math.inf, True),
    ],
)
def test_improves(mode: Any, delta: float, value: float, best: float | None, better: bool) -> None:
    assert Monitor("validation/loss", mode, delta).improves(value, best) is better


def test_read() -> None:
    monitor = Monitor("validation/accuracy", "max")

    assert monitor.read({"validation/accuracy": 0.5}) == 0.5
    assert monitor.split == "validation"
    with pytest.raises(ValueError, match=r"metric 'validation/accuracy'. Did"):
        monitor.read({"validation/acuracy": 0.5})
    with pytest.raises(ValueError, match=r"Known: none"):
        monitor.read({})


def test_the_name_of_a_named_set() -> None:
    assert Monitor("validation/night/loss", "min").split == "validation"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("loss", "min"), "<split>/<name>"),
        ((7, "min"), "<split>/<name>"),
        (("train/b", "less"), "mode='min'"),
        (("train/accuracy", None), "'train/accuracy' is unknown"),
        (("val/loss", "min"), "'validation/loss'"),
        (("train/b", "min", -1.0), "min_delta.*at least 0"),
        (("train/b", "min", math.inf), "min_delta.*at least 0"),
    ],
)
def test_arguments_are_checked(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Monitor(*arguments)


class Pair(Task):
    """Two models, each with an optimizer and a loss of its own; the second has one only in every third batch."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def training_step(self, run: Run, batch: Any) -> Losses:
        run.track("second/seen", 1.0)
        yield "first", nn.functional.cross_entropy(self.first(batch[0]), batch[1])
        if run.progress.batch % 3 == 2:
            yield "second", nn.functional.cross_entropy(self.second(batch[0]), batch[1])


def fit_pair(name: str, *plugins: Any, epochs: int = 2, **options: Any) -> tuple[EarlyStopping, RunResult]:
    """Train a `Pair` on 6 batches an epoch with a log after each, and a monitor that never stops it."""
    stopper = EarlyStopping(name, mode="min", patience=100)
    trainer = Trainer([stopper, LogSchedule(Every(steps=1)), *plugins], device="cpu", **options)
    optimizers = {"first": kit.sgd(), "second": kit.sgd()}
    return stopper, trainer.fit(Pair(), kit.class_batches(6), optimizer=optimizers, epochs=epochs)


@pytest.mark.parametrize(("name", "readings"), [("first_loss", 12), ("second_loss", 4), ("second/seen", 12)])
def test_a_metric_of_one_of_several_optimizers_is_read_at_each_log_that_has_it(name: str, readings: int) -> None:
    stopper, result = fit_pair(f"train/{name}")

    assert stopper.best is not None
    assert stopper.monitor._readings == readings
    assert (result.status, result.warnings) == ("completed", ())


@pytest.mark.parametrize("name", ["train/nonsense", "train/loss"])
def test_an_unknown_name_beside_several_optimizers_is_refused_at_the_first_log(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no metric '{name}'.*Known: train/first_loss, train/second/seen\."):
        fit_pair(name)


def test_a_plateau_and_the_best_checkpoint_go_by_the_loss_of_one_of_several_optimizers(tmp_path: Path) -> None:
    saves = kit.saving(tmp_path, Every(steps=1), keep_best=1, monitor="train/second_loss")
    _, result = fit_pair("train/first_loss", *saves)

    assert result.best_checkpoint is not None
    judged_by = read_manifest(result.best_checkpoint).judged_by
    assert judged_by is not None
    assert judged_by[0] == "train/second_loss"


def test_a_log_that_no_batch_was_in_is_not_a_reading() -> None:
    """A plugin adds metrics to it all the same."""

    class LogsAtTheStart(Plugin):
        asks = ("log",)

        @on(EpochStart)
        def ask(self, run: Run, event: EpochStart) -> None:
            run.control.request_log("to see")

        @on(Log, lane=Lane.MEASURE)
        def add(self, run: Run, event: Log) -> None:
            event.metrics["train/mine"] = 1.0

    stopper = EarlyStopping("train/mine", mode="min", patience=100)
    kit.fit(stopper, LogsAtTheStart(), LogSchedule(Every(steps=1)))
    assert stopper.monitor._readings == 2  # of three logs


def fit_validated(name: str, *plugins: Any, task: Any = None, sets: Any = None, epochs: int = 1) -> tuple[int, str]:
    """Train with a monitor; return how many batches were trained before it was refused, and the error."""
    trained: list[int] = []
    trainer = Trainer(
        [EarlyStopping(name, mode="min", patience=100), ValidationSchedule(Every(epochs=1)), *plugins], device="cpu"
    )
    trainer.bus.on(BatchEnd, lambda run, event: trained.append(run.progress.batch))
    validation = kit.class_batches(2) if sets is None else sets
    with pytest.raises(ValueError, match="no metric") as error:
        kit.fit(trainer, task=task, validation=validation, epochs=epochs)
    return len(trained), str(error.value)


def test_a_misspelt_name_is_refused_before_the_training_where_the_task_names_what_it_measures() -> None:
    task = kit.linear_classifier(metrics={"accuracy": accuracy})

    trained, error = fit_validated("validation/los", task=task)
    assert trained == 0
    assert_facts(error, "'validation/los'", "'validation/loss'", "Known: validation/accuracy, validation/loss.")


def test_a_name_without_its_set_is_refused_before_the_training() -> None:
    sets = {"day": kit.class_batches(1), "night": kit.class_batches(1)}
    trained, error = fit_validated("validation/loss", sets=sets)

    assert trained == 0
    assert_facts(error, "will be no metric", "'validation/loss'")
    assert "validation/day/loss, validation/night/loss" in error


class Measuring(Supervised):
    """Measures what nobody knows before."""

    def validation_step(self, run: Run, batch: Any) -> dict[str, Any]:
        return {"mine": 1.0}


def measuring() -> Measuring:
    return Measuring(nn.Linear(4, 2), nn.functional.cross_entropy)


def test_a_set_that_is_not_there_is_refused_before_the_training_whatever_the_task_measures() -> None:
    trained, error = fit_validated("validation/dawn/mine", task=measuring(), sets={"day": kit.class_batches(1)})

    assert trained == 0
    assert error.endswith("Known: validation/day/<name>.")


def test_a_name_that_only_the_first_validation_shows_to_be_wrong_is_refused_there() -> None:
    trained, error = fit_validated("validation/loss", task=measuring(), epochs=3)

    assert trained == 2
    assert_facts(error, "is no metric", "'validation/loss'", "'validation/mine'", "Known: validation/mine.")


def test_a_plugin_of_the_users_own_may_add_the_metric() -> None:
    class Adds(Plugin):
        @on(ValidationEnd, lane=Lane.MEASURE)
        def add(self, run: Run, event: ValidationEnd) -> None:
            event.metrics["validation/mean"] = 0.5

    stopper = EarlyStopping("validation/mean", mode="min", patience=100)
    sets = {"day": kit.class_batches(1), "night": kit.class_batches(1)}
    kit.fit(Adds(), stopper, ValidationSchedule(Every(epochs=1)), validation=sets)
    assert stopper.best == 0.5


def test_a_metric_that_comes_in_some_validations_is_read_in_those() -> None:
    class Sometimes(Measuring):
        def validation_step(self, run: Run, batch: Any) -> dict[str, Any]:
            return {"loss": 1.0} | ({"mine": 2.0} if run.progress.validations % 2 == 0 else {})

    stopper = EarlyStopping("validation/mine", mode="min", patience=100)
    task = Sometimes(nn.Linear(4, 2), nn.functional.cross_entropy)
    result = kit.fit(stopper, ValidationSchedule(Every(epochs=1)), task=task, validation=kit.class_batches(1), epochs=5)

    assert (stopper.monitor._readings, stopper.monitor._misses) == (3, 2)
    assert result.warnings == ()


def test_a_monitor_that_was_never_read_is_a_warning() -> None:
    result = kit.fit(
        EarlyStopping(), ValidationSchedule(Every(epochs=5), at_end=False), validation=kit.class_batches(1), epochs=2
    )

    (warning,) = result.warnings[1:]
    assert_facts(warning, "EarlyStopping", "'validation/loss'", "not measured")
    assert "ValidationSchedule(epochs=1)" in warning
    result = kit.fit(EarlyStopping("train/loss"), LogSchedule(Every(steps=50)))
    assert "'train/loss' was not measured" in result.warnings[0]


def test_a_resumed_run_that_does_not_measure_again_is_not_warned_of(tmp_path: Path) -> None:
    plugins = [EarlyStopping(), ValidationSchedule(Every(steps=2))]
    states: list[Any] = []
    first = Trainer([*plugins, SaveSchedule(Every(steps=2))], device="cpu")
    first.bus.on(SavePoint, lambda run, event: states.append(run.state_dict()))
    kit.fit(first, validation=kit.class_batches(1), steps=2)

    second = Trainer([EarlyStopping(), ValidationSchedule(Every(steps=2))], device="cpu")
    second.bus.on(TrainStart, lambda run, event: run.resume(states[-1]))
    assert kit.fit(second, validation=kit.class_batches(1), steps=3).warnings == ()


def test_a_metric_that_a_resumed_run_no_longer_measures_is_a_warning() -> None:
    """The former program measured it."""
    states: list[Any] = []
    first = Trainer([EarlyStopping(), ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))], device="cpu")
    first.bus.on(SavePoint, lambda run, event: states.append(run.state_dict()))
    kit.fit(first, validation=kit.class_batches(1))

    second = Trainer([EarlyStopping(), ValidationSchedule(Every(epochs=1))], device="cpu")
    second.bus.on(TrainStart, lambda run, event: run.resume(states[-1]))
    result = kit.fit(second, task=measuring(), validation=kit.class_batches(1), epochs=3)
    assert any("none of 2 measurements" in each for each in result.warnings)
