"""Each callback that ships with Lightning runs or is refused; those that run do what they do in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import pytorch_lightning
from heliograph import BatchEnd, LogSchedule, Plugin, Run, Trainer, ValidationSchedule, on
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from heliograph_bridges.lightning.refused import REFUSED

RUN: dict[str, Callable[[], Any]] = {
    "Callback": lambda: theirs.Callback(),
    "DeviceStatsMonitor": lambda: theirs.DeviceStatsMonitor(),
    "EarlyStopping": lambda: theirs.EarlyStopping("val_loss"),
    "EMAWeightAveraging": lambda: theirs.EMAWeightAveraging(decay=0.9),
    "LambdaCallback": lambda: theirs.LambdaCallback(on_train_end=lambda trainer, module: None),
    "LearningRateMonitor": lambda: theirs.LearningRateMonitor(),
    "ModelSummary": lambda: theirs.ModelSummary(),
    "RichModelSummary": lambda: theirs.RichModelSummary(),
    "Timer": lambda: theirs.Timer(),
    "WeightAveraging": lambda: theirs.WeightAveraging(),
}
MADE: dict[str, Callable[[], Any]] = {  # of what is refused
    "BackboneFinetuning": lambda: theirs.BackboneFinetuning(),
    "BaseFinetuning": lambda: theirs.BaseFinetuning(),
    "BasePredictionWriter": lambda: theirs.BasePredictionWriter(),
    "BatchSizeFinder": lambda: theirs.BatchSizeFinder(),
    "Checkpoint": lambda: theirs.Checkpoint(),
    "GradientAccumulationScheduler": lambda: theirs.GradientAccumulationScheduler({0: 1}),
    "LearningRateFinder": lambda: theirs.LearningRateFinder(),
    "ModelCheckpoint": lambda: theirs.ModelCheckpoint(),
    "ModelPruning": lambda: theirs.ModelPruning("l1_unstructured"),
    "OnExceptionCheckpoint": lambda: theirs.OnExceptionCheckpoint("."),
    "ProgressBar": lambda: theirs.ProgressBar(),
    "RichProgressBar": lambda: theirs.RichProgressBar(),
    "SpikeDetection": lambda: theirs.SpikeDetection(),
    "StochasticWeightAveraging": lambda: theirs.StochasticWeightAveraging(0.05, 0.5),
    "ThroughputMonitor": lambda: theirs.ThroughputMonitor(lambda batch: 3),
    "TQDMProgressBar": lambda: theirs.TQDMProgressBar(),
}


def fit(callback: Any, *plugins: Any, **options: Any) -> Any:
    usual = [LogSchedule(steps=1), ValidationSchedule(epochs=1)]
    trainer = Trainer([*usual, *plugins, from_lightning(callback)], device="cpu")
    options = {"train": kit.class_batches(4), "validation": kit.class_batches(1), "epochs": 3} | options
    return kit.fit(trainer, **options)


def test_each_one_is_known() -> None:
    assert sorted([*RUN, *MADE]) == sorted(theirs.__all__)
    assert MADE.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", sorted(RUN))
def test_it_runs(name: str) -> None:
    result = fit(RUN[name]())
    assert (result.status, result.progress.steps, result.warnings) == ("completed", 12, ())


@pytest.mark.parametrize("name", sorted(MADE))
def test_it_is_refused_with_the_reason_and_what_of_ours_does_it(name: str) -> None:
    why, instead = REFUSED[name]
    with pytest.raises(ValueError, match="cannot run here: it") as caught:
        from_lightning(MADE[name]())
    assert_facts(str(caught.value), name, "cannot run here", why, f"Use {instead}.")


def test_what_inherits_from_a_refused_one_is_refused() -> None:
    class Mine(theirs.ModelCheckpoint):
        pass

    with pytest.raises(ValueError, match=r"^Mine, a ModelCheckpoint, cannot"):
        from_lightning(Mine())


def test_the_page_has_a_row_for_each() -> None:
    page = (Path(__file__).parents[4] / "docs/packages/bridges.md").read_text(encoding="utf-8")
    assert [name for name in theirs.__all__ if f"`{name}`" not in page] == []


def test_those_of_the_other_package_run_too() -> None:
    assert pytorch_lightning.Callback is not theirs.Callback  # type: ignore[comparison-overlap]
    stopper = pytorch_lightning.callbacks.EarlyStopping("val_loss", stopping_threshold=10.0)
    result = fit(stopper)
    assert (result.status, result.stopped_by, result.progress.epoch) == ("stopped", "lightning_early_stopping", 1)
    with pytest.raises(ValueError, match=r"^ModelCheckpoint cannot run here"):
        from_lightning(pytorch_lightning.callbacks.ModelCheckpoint())


@pytest.mark.parametrize("given", [theirs.EarlyStopping, object(), None])
def test_anything_else_is_an_error(given: object) -> None:
    with pytest.raises(TypeError, match="from_lightning takes a callback"):
        from_lightning(given)


def weights(module: Any) -> list[float]:
    return [value for each in module.parameters() for value in each.flatten().tolist()]


def test_averaged_weights_are_those_of_lightnings_trainer(lightning_fit: Callable[..., Any]) -> None:
    task, made = kit.linear_classifier(), RUN["EMAWeightAveraging"]
    fit(made(), task=task, epochs=4)
    trainer = lightning_fit([made()], max_epochs=4)
    assert weights(task.model) == weights(trainer.lightning_module)
    plain = kit.linear_classifier()
    kit.fit(task=plain, train=kit.class_batches(4), epochs=4)
    assert weights(task.model) != weights(plain.model)


class Slow(Plugin):
    """Lets a timer run out at a batch."""

    def __init__(self, timer: theirs.Timer) -> None:
        self.timer = timer

    @on(BatchEnd)
    def look(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == 6:
            self.timer._offset = 2000


def test_a_timer_stops_in_the_middle_of_an_epoch() -> None:
    timer = theirs.Timer("00:00:30:00")
    result = fit(timer, Slow(timer))
    assert (result.stopped_by, result.progress.epoch, result.progress.batch) == ("lightning_timer", 1, 2)
    assert timer.time_elapsed("train") >= 2000
    assert timer.time_elapsed("validate") > 0


def test_a_lambda_callback_is_called_with_the_trainer_and_the_module() -> None:
    found = []
    callback = theirs.LambdaCallback(
        on_train_epoch_end=lambda trainer, module: found.append((trainer.global_step, module.global_step)),
        on_validation_end=lambda trainer, module: found.append((trainer.current_epoch, module.current_epoch)),
    )
    fit(callback, epochs=2)
    assert found == [(0, 0), (4, 4), (1, 1), (8, 8)]


def test_a_summary_is_that_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        fit(theirs.ModelSummary())
    assert "| Linear | 10" in caplog.text
