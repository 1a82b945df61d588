"""The checks of the trainer's arguments and of what creators return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph_ray import CreatorTrainer
from heliograph_ray.creators import LocalLauncher


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model_creator": torch.nn.Linear(1, 1), "data_creator": None}, TypeError, "data_creator= takes a function"),
        ({"train_function": 3}, TypeError, "train_function= takes a function"),
        ({"engine": 3}, TypeError, "engine= takes the name of an engine, or a function"),
        ({"launcher": 2}, TypeError, r"such as LocalLauncher\(2\)"),
        ({"launcher": LocalLauncher}, TypeError, r"such as LocalLauncher\(2\)"),
        (
            {"batchsize": 2},
            TypeError,
            "'batchsize'.*'batch_size'.*launcher, .*raysgd",
        ),
        ({"seed": "0"}, ValueError, "seed= must be"),
        ({"name": "a/b"}, ValueError, "name= becomes"),
        ({"dataloader_config": [1]}, TypeError, "dataloader_config= takes a dict"),
        (
            {"batch_size": 0},
            ValueError,
            "samples of all ranks",
        ),
        ({"batch_size": True}, ValueError, "batch_size= must be a"),
        ({"dataloader_config": {"batch_size": 4}}, ValueError, "is given by batch_size="),
        ({"scheduler_step_freq": "step"}, ValueError, "or None, got 'step'"),
        (
            {"scheduler_creator": creators.scheduler, "scheduler_step_freq": None},
            ValueError,
            "train_function or to a",
        ),
        (
            {"scheduler_creator": creators.scheduler, "train_function": creators.train_as_usual},
            ValueError,
            "the function may step",
        ),
        (
            {"metrics": {"a": creators.loss}, "train_function": creators.train_as_usual},
            ValueError,
            "train_function returns its own",
        ),
    ],
)
def test_invalid_arguments_are_refused_at_once(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data_creator": lambda config: [1, 2, 3]}, ValueError, "a dataset, or two"),
        (
            {"data_creator": lambda config: torch.utils.data.DataLoader(creators.data(config)[0])},
            ValueError,
            "not loaders",
        ),
        ({"model_creator": lambda config: []}, TypeError, "a list of modules"),
        ({"optimizer_creator": lambda model, config: model}, TypeError, "an optimizer of torch"),
        ({"scheduler_creator": lambda optimizer, config: optimizer}, TypeError, "a scheduler of torch"),
        ({"loss_creator": lambda config: 3}, TypeError, "loss_creator= takes a loss"),
        ({"plugin_creator": lambda config: None}, TypeError, "of plugins, got None"),
        ({"scheduler_creator": creators.plateau}, ValueError, "by a metric, .*'manual'"),
        ({"dataloader_config": {"workers": 3}}, ValueError, "loader_params= has no 'workers'"),
        ({"precision": "fp8"}, ValueError, "fp8"),
    ],
)
def test_invalid_values_of_creators_are_refused(options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make(**options).train()


@pytest.mark.parametrize("numbers", [{"max_retries": -1}, {"passes": 0}, {"passes": True}])
def test_numbers_of_passes_and_retries(numbers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number,"):
        make().train(**numbers)


def test_the_epoch_frequency_needs_no_scheduler() -> None:
    assert "train/loss" in make(scheduler_step_freq="epoch").train()
    assert "train/own_loss" in make(scheduler_step_freq="epoch", train_function=creators.train_as_usual).train()


@pytest.mark.parametrize("options", [{"nprocs": 0}, {"nprocs": True}, {"grace": 0.0}, {"grace": "3"}])
def test_invalid_options_of_the_local_launcher_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be a"):
        LocalLauncher(**options)


def test_creators_may_be_given_in_their_order() -> None:
    options: dict[str, Any] = {"config": {"lr": 0.1}, "batch_size": 8, "use_cpu": True}
    by_place = CreatorTrainer(creators.model, creators.data, creators.optimizer, torch.nn.CrossEntropyLoss, **options)
    assert by_place.train() == make().train()


def test_a_checkpoint_s_name_without_its_ending_is_answered(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    with pytest.raises(ValueError, match=r"ends in \.pth, got '.*checkpoint'"):
        trainer.save(tmp_path / "checkpoint")
    path = trainer.save(tmp_path / "checkpoint.pth")
    other = make()
    other.restore(path)
    assert torch.equal(weights(other), weights(trainer))
