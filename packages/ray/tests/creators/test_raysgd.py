"""RaySGD's own arguments and methods: what to write instead of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import make, weights
from heliograph_ray import CreatorTrainer
from heliograph_ray.creators.raysgd import ARGUMENTS, CALLS, METHODS


@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [
        ("use_gpu", True, "use_cpu=False to compute on a GPU, use_cpu=True on the CPU"),
        ("use_gpu", True, "launcher=RayLauncher(num_workers, use_gpu=True)"),
        (
            "num_replicas",
            4,
            "launcher=LocalLauncher(4) for processes on this machine, launcher=RayLauncher(4) on a clus",
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
    assert str(caught.value).startswith(f"CreatorTrainer has no argument {argument!r}. Instead: ")
    assert instead in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_has_an_answer_with_any_value(argument: str) -> None:
    for value in (True, 2, "auto", {"a": 1}, None):
        with pytest.raises(TypeError, match=rf"^CreatorTrainer has no argument '{argument}'\. Instead: "):
            make(**{argument: value})


def test_creators_may_be_given_in_their_order() -> None:
    options: dict[str, Any] = {"config": {"lr": 0.1}, "batch_size": 8, "use_cpu": True}
    by_place = CreatorTrainer(creators.model, creators.data, creators.optimizer, torch.nn.CrossEntropyLoss, **options)
    assert by_place.train() == make().train()


@pytest.mark.parametrize(
    ("method", "arguments", "instead"),
    [
        ("train", {"checkpoint": "auto"}, "the state before each pass is kept in memory"),
        ("train", {"num_steps": 3}, "a smaller set in data_creator"),
        ("validate", {"reduce_results": False}, "means over the samples of all ranks"),
        ("shutdown", {"force": True}, "there is nothing to kill"),
    ],
)
def test_an_argument_of_a_method_is_answered(method: str, arguments: dict[str, Any], instead: str) -> None:
    trainer = make()
    with pytest.raises(TypeError) as caught:
        getattr(trainer, method)(**arguments)
    (name,) = arguments
    assert str(caught.value).startswith(f"CreatorTrainer.{method} has no argument {name!r}. Instead: ")
    assert instead in str(caught.value)
    assert trainer.result is None
    assert trainer.get_model() is not None  # it was not shut down


def test_an_unknown_argument_of_a_method_is_refused_too() -> None:
    for method in CALLS:
        with pytest.raises(
            TypeError, match=rf"^CreatorTrainer\.{method} has no argument 'pases'\. docs/raysgd\.md has"
        ):
            getattr(make(), method)(pases=3)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_answered(method: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(make(), method)
    assert str(caught.value) == f"CreatorTrainer has no {method!r}. Instead: {METHODS[method]}."


def test_another_attribute_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match=r"^CreatorTrainer has no 'trian'\. Did you mean 'train'\? Known: get_model, "
    ):
        _ = make().trian
    assert not hasattr(make(), "load")


def test_a_checkpoint_s_name_without_its_ending_is_answered(tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    with pytest.raises(ValueError, match=r"ends in \.pth, got '.*checkpoint': call save\('.*checkpoint\.pth'\)"):
        trainer.save(tmp_path / "checkpoint")
    path = trainer.save(tmp_path / "checkpoint.pth")
    other = make()
    other.restore(path)
    assert torch.equal(weights(other), weights(trainer))
