"""What callbacks log reaches the logs and metrics of the run, whichever way they log."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from heliograph import Log, LogSchedule, Plugin, Run, Trainer, ValidationSchedule, on
from heliograph.packages.tests.facts import assert_each
from heliograph.tests import kit
from heliograph_bridges.lightning import from_lightning
from heliograph_bridges.lightning.names import our_name
from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor


class Logs(Plugin):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    @on(Log)
    def keep(self, run: Run, event: Log) -> None:
        self.rows.append({name: value for name, value in event.metrics.items() if name != "train/loss"})


def fit(callback: Any, *plugins: Any, **options: Any) -> tuple[list[dict[str, float]], Any]:
    trainer = Trainer([logs := Logs(), *plugins, from_lightning(callback)], device="cpu")
    options = {"train": kit.class_batches(4), "validation": kit.class_batches(2)} | options
    return logs.rows, kit.fit(trainer, **options)


@pytest.mark.parametrize(
    ("name", "phase", "ours"),
    [
        ("val_loss", "", "validation/loss"),
        ("valid_loss", "", "validation/loss"),
        ("train/loss_mean", "", "train/loss_mean"),
        ("test_f1", "", "test/f1"),
        ("accuracy", "", "accuracy"),
        ("accuracy", "validation", "validation/accuracy"),
        ("val_loss", "validation", "validation/loss"),
        ("val_loss", "train", "train/val_loss"),
        ("value_loss", "", "value_loss"),
        ("lr-SGD/pg1", "train", "train/lr-SGD/pg1"),
    ],
)
def test_the_rule_of_names(name: str, phase: str, ours: str) -> None:
    assert our_name(name, phase) == ours


def test_learning_rates_are_in_each_log() -> None:
    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    from heliograph import LearningRate

    schedules = [LearningRate("step"), LogSchedule(steps=2), ValidationSchedule(epochs=1)]
    rows, result = fit(LearningRateMonitor(log_momentum=True), *schedules, scheduler=halved)
    assert [row["train/lr-SGD"] for row in rows] == [0.05, 0.0125]  # of the step before the log
    assert rows[0]["train/lr-SGD-momentum"] == 0
    assert result.metrics["train/lr-SGD"] == 0.0125


def test_statistics_of_the_device_are_in_the_log() -> None:
    rows, _ = fit(DeviceStatsMonitor(), LogSchedule(steps=4), ValidationSchedule(epochs=1))
    assert rows[0].keys() >= {"train/DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"}


class Logging(pl.Callback):
    """Logs in the hooks of a training and of a validation, and reads what it has logged."""

    log: Any
    log_dict: Any

    def __init__(self) -> None:
        self.read: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("index", torch.tensor(float(batch_idx)), prog_bar=True)
        self.log_dict({"train_twice": 2.0 * batch_idx})
        self.read.append(trainer.callback_metrics["index"].item())

    def on_validation_batch_end(  # type: ignore[override]  # as people write it who have a single set
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.log("val_index", float(batch_idx))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("count", 7.0)
        self.read.append(trainer.callback_metrics["val_index"].item())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.read.append(trainer.callback_metrics["count"].item())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("last", 9.0)
        self.read.append(trainer.callback_metrics["last"].item())


def test_what_hooks_log_is_averaged_logged_and_found_again() -> None:
    callback = Logging()
    rows, result = fit(callback, LogSchedule(steps=2), ValidationSchedule(epochs=1), epochs=2)
    assert rows[:2] == [{"train/index": 0.5, "train/twice": 1.0}, {"train/index": 2.5, "train/twice": 5.0}]
    assert rows[2] == {"train/index": 0.5, "train/twice": 1.0, "train/last": 9.0}
    assert callback.read == [0.0, 1.0, 2.0, 3.0, 0.5, 7.0, 9.0] * 2
    assert (result.metrics["validation/index"], result.metrics["validation/count"]) == (0.5, 7.0)
    assert_each(result.notes, ("lightning_logging", "train/last"))


class Bad(pl.Callback):
    """Logs with an argument."""

    log: Any

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_train_batch_end(self, *given: Any) -> None:
        self.log("value", 1.0, **self.options)


def test_another_reduction_or_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(ValueError, match="only 'mean' is supported"):
        fit(Bad(reduce_fx="max"), ValidationSchedule(epochs=1))
    with pytest.raises(TypeError, match="does not take on_stepp"):
        fit(Bad(on_stepp=True), ValidationSchedule(epochs=1))


class Hyper(pl.Callback):
    """Logs hyperparameters."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.logger.log_hyperparams({"rate": 0.1})


def test_hyperparameters_are_given_elsewhere() -> None:
    with pytest.raises(NotImplementedError, match="pass them to fit"):
        fit(Hyper(), ValidationSchedule(epochs=1))
