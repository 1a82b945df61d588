"""Modules with an extra state, and compiled ones, are saved, loaded and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heliograph import EMA, Every, Run, RunResult, Supervised, Task, TrainedOnly, Trainer, load_weights
from heliograph.core.engines.options import modules_of
from heliograph.tests import kit
from heliograph.tests.kit import class_batches, random_batches, saving
from torch import Tensor, nn


def fit(folder: Path, epochs: int, make: Callable[[], Any], **options: Any) -> Any:
    torch.manual_seed(0)
    net = make()
    kit.fit(
        *saving(folder, Every(epochs=1), **options),
        task=Supervised(net, nn.functional.mse_loss),
        train=random_batches(3, inputs=3, outputs=3),
        optimizer=lambda parameters: torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1),
        epochs=epochs,
    )
    return net


class Tied(nn.Module):
    """A layer whose weights are in its extra state, too, which has a tensor of a growing length besides."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.linear, self.replaces = nn.Linear(3, 3), replaces
        self.seen = torch.zeros(0)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, inputs.detach()[:1, 0]])
        output: Tensor = self.linear(inputs)
        return output

    def get_extra_state(self) -> Tensor | dict[str, Tensor]:
        return {"weight": self.linear.weight} if self.replaces else self.seen

    def set_extra_state(self, state: Any) -> None:
        if self.replaces:
            self.linear.weight = state["weight"]
        else:
            self.seen = state.clone()


def resumed(folder: Path, *, replaces: bool) -> Any:
    for epochs in (1, 2):
        net = fit(folder, epochs, partial(Tied, replaces=replaces), resume="auto")
    return net


def test_an_extra_state_is_of_any_shape(tmp_path: Path) -> None:
    assert len(resumed(tmp_path, replaces=False).seen) == 6


def test_a_parameter_that_would_be_trained_no_longer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replaced 1 parameters"):
        resumed(tmp_path, replaces=True)


class Encoder(nn.Module):
    """A network whose first part may be compiled."""

    def __init__(self, *, compiles: bool) -> None:
        super().__init__()
        layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.encoder = compiled(layers) if compiles else layers
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(inputs))
        return output


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def in_place() -> nn.Module:
    module = Encoder(compiles=False)
    module.compile(backend="eager")
    return module


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(Encoder, compiles=False),
    "compiled": lambda: compiled(Encoder(compiles=False)),
    "part": partial(Encoder, compiles=True),
    "both": lambda: compiled(Encoder(compiles=True)),
    "in place": in_place,
}


def train_network(kind: str, folder: Path, epochs: int, *plugins: Any, task: Any = None, **options: Any) -> RunResult:
    torch._dynamo.reset()
    return kit.fit(
        *saving(folder, Every(epochs=1), resume="auto", **options),
        *plugins,
        task=network_task(kind) if task is None else task,
        train=class_batches(3),
        epochs=epochs,
    )


def network_task(kind: str, seed: int = 0) -> Supervised:
    torch.manual_seed(seed)
    return Supervised(NETWORKS[kind](), nn.functional.cross_entropy)


def numbers(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


of_compiled_code = pytest.mark.filterwarnings(
    "ignore:.*script_method.* is deprecated:DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)


@of_compiled_code
@pytest.mark.parametrize(
    ("before", "after"), [("plain", each) for each in list(NETWORKS)[1:]] + [(each, "plain") for each in NETWORKS]
)
def test_a_compiled_module_is_the_network_that_was_compiled(tmp_path: Path, before: str, after: str) -> None:
    first = train_network(before, tmp_path, 1, EMA(0.5, validate=False))
    assert first.last_checkpoint is not None
    saved = torch.load(first.last_checkpoint)
    weights, average = saved["modules"]["model"], saved["plugins"]["ema"]["weights"]["model"]
    plain = network_task("plain").model
    assert list(weights) == list(plain.state_dict())
    assert list(average) == [name for name, _ in plain.named_parameters()]

    task = network_task(after, seed=1)
    load_weights(task, first.last_checkpoint)
    assert all(map(torch.equal, task.model.state_dict().values(), weights.values()))
    load_weights(task.model, first.last_checkpoint, average="ema")
    assert all(map(torch.equal, task.model.parameters(), average.values()))

    task = network_task(after, seed=1)
    resumed = train_network(after, tmp_path, 2, EMA(0.5, validate=False), task=task)
    # Compiled code may round differently.
    same_code = {before, after} <= {"plain", "in place"}
    assert resumed.resume is not None
    assert ["compiled modules" in reason for reason in resumed.resume.reasons] == [True] * (not same_code)
    whole = network_task("plain")
    train_network("plain", tmp_path / "whole", 2, task=whole)
    assert all(map(torch.equal, task.model.state_dict().values(), whole.model.state_dict().values()))


@of_compiled_code
@pytest.mark.parametrize("kind", ["compiled", "part"])
def test_a_compiled_module_resumes_in_another_process(tmp_path: Path, kind: str) -> None:
    train_network(kind, tmp_path, 1)
    for _ in range(3):  # compiled again, the wrappers have other numbers
        compiled(nn.Linear(1, 1))
    result = train_network(kind, tmp_path, 2)
    assert result.resume is not None
    assert (result.resume.step, result.resume.reasons) == (3, ())


@of_compiled_code
@pytest.mark.parametrize("before", ["plain", "part"])
def test_frozen_weights_that_are_not_saved_are_found_in_a_compiled_module(tmp_path: Path, before: str) -> None:
    def half(kind: str) -> Supervised:
        task = network_task(kind)
        task.model.encoder.requires_grad_(False)
        return task

    first = train_network(before, tmp_path, 1, TrainedOnly(), task=half(before))
    assert first.last_checkpoint is not None
    for kind in ("compiled", "part", "plain"):
        load_weights(half(kind), first.last_checkpoint)
    after = "part" if before == "plain" else "plain"
    assert train_network(after, tmp_path, 2, TrainedOnly(), task=half(after)).progress.steps == 6


@of_compiled_code
def test_a_compiled_module_is_tested_with_saved_weights(tmp_path: Path) -> None:
    first = train_network("plain", tmp_path, 1)
    trainer = Trainer(device="cpu")
    results = [
        trainer.test(network_task(kind, seed=1), class_batches(2), weights=str(first.last_checkpoint)).metrics
        for kind in ("plain", "compiled", "part")
    ]
    assert results[0]["test/loss"] == pytest.approx(results[1]["test/loss"])
    assert results[0]["test/loss"] == pytest.approx(results[2]["test/loss"])


@of_compiled_code
def test_one_of_several_modules_is_compiled(tmp_path: Path) -> None:
    class Two(Task):
        def __init__(self, *, compiles: bool) -> None:
            self.body, head = nn.Linear(4, 3), nn.Linear(3, 2)
            self.head = compiled(head) if compiles else head

        def training_step(self, run: Run, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    first = train_network("", tmp_path, 1, task=Two(compiles=True))
    assert first.last_checkpoint is not None
    load_weights(Two(compiles=False), first.last_checkpoint)
    load_weights(compiled(nn.Linear(3, 2)), first.last_checkpoint)
    assert train_network("", tmp_path, 2, task=Two(compiles=False)).progress.steps == 6


def test_a_compiled_network_of_other_shapes_is_refused_by_its_own_names(tmp_path: Path) -> None:
    torch.save(network_task("plain").model.state_dict(), tmp_path / "model.pth")
    other: Any = network_task("part")
    other.model.encoder._orig_mod[0] = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"shape \[3, 4\]"):
        load_weights(other, tmp_path / "model.pth")


def test_a_compiled_module_of_length_zero_is_unwrapped() -> None:
    class Empty(nn.Linear):
        def __len__(self) -> int:
            return 0

    original = Empty(1, 1)
    compiled = torch.compile(original, backend="eager")
    assert modules_of(SimpleNamespace(model=compiled)) == {"model": original}
