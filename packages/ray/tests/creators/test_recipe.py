"""The checks of the trainer's arguments and of what creators return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph.packages.tests.facts import assert_facts
from heliograph_ray import CreatorTrainer
from heliograph_ray.creators import LocalLauncher
from heliograph_ray.creators.raysgd import ARGUMENTS, CALLS, METHODS


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model_creator": torch.nn.Linear(1, 1), "data_creator": None}, TypeError, "data_creator= takes a function"),
        ({"train_function": 3}, TypeError, "train_function= takes a function"),
        ({"engine": 3}, TypeError, "engine= takes the name"),
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


@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [
        ("use_gpu", True, "use_cpu=False to compute on"),
        ("use_gpu", True, "launcher=RayLauncher(num_workers, use_gpu=True)"),
        (
            "num_replicas",
            4,
            "launcher=RayLauncher(4) on",
        ),
        ("backend", "gloo", "engine=functools.partial(DDPEngine, 'gloo')"),
        ("use_fp16", True, "precision='fp16' or 'bf16'"),
        ("num_cpus_per_worker", 2, "resources_per_worker={'CPU': 2}"),
        ("data_loader_args", {"num_workers": 2}, "dataloader_config={'num_workers': 2}"),
    ],
)
def test_an_argument_is_answered_with_ours(argument: str, value: Any, instead: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(**{argument: value})
    assert_facts(str(caught.value), "CreatorTrainer", f"argument {argument!r}", "Instead: ")
    assert instead in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_has_an_answer_with_any_value(argument: str) -> None:
    for value in (True, 2, "auto", {"a": 1}, None):
        with pytest.raises(TypeError, match=rf"argument '{argument}'\. Instead:"):
            make(**{argument: value})


def test_creators_may_be_given_in_their_order() -> None:
    options: dict[str, Any] = {"config": {"lr": 0.1}, "batch_size": 8, "use_cpu": True}
    by_place = CreatorTrainer(creators.model, creators.data, creators.optimizer, torch.nn.CrossEntropyLoss, **options)
    assert by_place.train() == make().train()


@pytest.mark.parametrize(
    ("method", "arguments", "instead"),
    [
        ("train", {"checkpoint": "auto"}, "kept in memory"),
        ("train", {"num_steps": 3}, "smaller set in data_creator"),
        ("validate", {"reduce_results": False}, "samples of all ranks"),
        ("shutdown", {"force": True}, "nothing to kill"),
    ],
)
def test_an_argument_of_a_method_is_answered(method: str, arguments: dict[str, Any], instead: str) -> None:
    trainer = make()
    with pytest.raises(TypeError) as caught:
        getattr(trainer, method)(**arguments)
    (name,) = arguments
    assert_facts(str(caught.value), f"CreatorTrainer.{method}", f"argument {name!r}", "Instead: ")
    assert instead in str(caught.value)
    assert trainer.result is None
    assert trainer.get_model() is not None  # it was not shut down


def test_an_unknown_argument_of_a_method_is_refused_too() -> None:
    for method in CALLS:
        with pytest.raises(TypeError, match=r"argument 'pases'\. docs/howto/migrate_from_raysgd\.md"):
            getattr(make(), method)(pases=3)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_answered(method: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(make(), method)
    assert str(caught.value) == f"CreatorTrainer has no {method!r}. Instead: {METHODS[method]}."


def test_another_attribute_is_refused_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"mean 'train'\? Known: get_model,"):
        _ = make().trian
    assert not hasattr(make(), "load")


def test_a_checkpoint_s_name_without_its_ending_is_answered(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    with pytest.raises(ValueError, match=r"got '.*checkpoint': call save\('.*checkpoint\.pth'\)"):
        trainer.save(tmp_path / "checkpoint")
    path = trainer.save(tmp_path / "checkpoint.pth")
    other = make()
    other.restore(path)
    assert torch.equal(weights(other), weights(trainer))
