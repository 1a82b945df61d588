"""Weights that come back into a task: those of modules that load in their own way, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    Checkpoint,
    Every,
    LogSchedule,
    Plugin,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    load_weights,
    on,
)
from heliograph.core.engines.weights import check_fits
from heliograph.tests import kit
from heliograph.tests.kit import adam, saving
from heliograph.tests.messages import assert_facts, has_facts
from torch import Tensor, nn


class Memory(nn.Module):
    """Adds the mean of what it was given before, all of which it keeps in a buffer."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(0, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, inputs.detach()])
        return inputs + self.kept.mean(0)


class Overriding(Memory):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.kept = torch.empty_like(state_dict[prefix + "kept"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.resize)  # type: ignore[no-untyped-call]  # torch's own lack

    @staticmethod
    def resize(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        module.kept = torch.empty_like(state_dict[prefix + "kept"])


class Absent(Memory):
    """Its buffer is not even there before it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = None  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = torch.zeros(0, 2) if self.kept is None else self.kept
        return super().forward(inputs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.kept = state_dict[prefix + "kept"].clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Whole(nn.Sequential):
    """A network that resizes what a part of it holds."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        memory: Any = self[0]
        memory.kept = torch.empty_like(state_dict["0.kept"])
        return super().load_state_dict(state_dict, strict, assign)


def network(kind: str, width: int = 2) -> nn.Module:
    torch.manual_seed(0)
    if kind == "whole":
        return Whole(Memory(), nn.Linear(2, width))
    return nn.Sequential({"override": Overriding, "hook": Hooked, "absent": Absent}[kind](), nn.Linear(2, width))


def fit(folder: Path, model: nn.Module, epochs: int) -> RunResult:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 2, generator=generator), torch.tensor([0, 1, 0])) for _ in range(4)]
    task = Supervised(model, nn.functional.cross_entropy)
    plugins = saving(folder, Every(steps=2), resume="auto")
    return kit.fit(*plugins, task=task, train=data, optimizer=adam(0.1), epochs=epochs)


KINDS = ["whole", "override", "hook", "absent"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_resizes_its_buffers_is_resumed(kind: str, tmp_path: Path) -> None:
    whole, resumed = network(kind), network(kind)
    fit(tmp_path / "whole", whole, 3)
    fit(tmp_path / "halves", network(kind), 1)
    result = fit(tmp_path / "halves", resumed, 3)

    assert any(has_facts(note, "resumed", "epoch 0", "batch 4", "step 4") for note in result.notes)
    assert whole.state_dict()["0.kept"].shape == (36, 2)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_buffer_that_nobody_makes_room_for_is_refused_with_the_mend(tmp_path: Path) -> None:
    fit(tmp_path, nn.Sequential(Memory(), nn.Linear(2, 2)), 1)
    with pytest.raises(ValueError, match=r"shape \[12, 2\],"):
        fit(tmp_path, nn.Sequential(Memory(), nn.Linear(2, 2)), 2)


@pytest.mark.parametrize("kind", ["override", "hook", "absent"])
def test_what_others_of_its_network_hold_must_fit_and_nothing_is_loaded_where_it_does_not(
    kind: str, tmp_path: Path
) -> None:
    fit(tmp_path, network(kind), 1)
    other = network(kind, width=3)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=r"\[2, 2\], the task's"):
        fit(tmp_path, other, 3)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_what_a_module_refuses_itself_names_the_file_and_the_module(tmp_path: Path) -> None:
    path = fit(tmp_path, network("whole"), 1).last_checkpoint
    said = r"'model'.*Error\(s\) in .*size mismatch"
    with pytest.raises(ValueError, match=rf"(?s){said}") as caught:
        fit(tmp_path, network("whole", width=3), 3)
    assert_facts(caught.value.__notes__[0], "continuing from", path)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert path is not None
    with pytest.raises(ValueError, match=rf"(?s)^{path}: .*{said}"):
        load_weights(Supervised(network("whole", width=3), nn.functional.cross_entropy), path)


def test_torch_s_own_ways_do_not_count() -> None:
    def saved(width: int) -> dict[str, nn.Module]:
        return {"model": nn.Sequential(nn.Linear(1, width), nn.BatchNorm1d(width, affine=False))}

    check_fits(saved(2), {"model": saved(2)["model"].state_dict()})
    norm = nn.Sequential(nn.Identity(), nn.BatchNorm1d(3, affine=False)).state_dict()
    with pytest.raises(ValueError, match=r"\[3\], the task's \[2\]"):
        check_fits(saved(2), {"model": saved(2)["model"].state_dict() | norm})


def test_parameters_without_a_shape_yet_take_any() -> None:
    check_fits({"model": nn.LazyLinear(2)}, {"model": nn.Linear(3, 2).state_dict()})


def test_extra_state_is_the_module_s_own_business() -> None:
    class Extra(nn.Linear):
        size = 1

        def get_extra_state(self) -> Tensor:
            return torch.zeros(self.size)

        def set_extra_state(self, state: Tensor) -> None:
            self.size = len(state)

    wide, now = Extra(1, 1), Extra(1, 1)
    wide.size = 3
    check_fits({"model": now}, {"model": wide.state_dict()})
    with pytest.raises(ValueError, match=r"shape \[2, 1\]"):
        check_fits({"model": now}, {"model": wide.state_dict() | {"weight": torch.zeros(2, 1)}})


PAIRS = r"^Supervised takes batches of \(inputs, targets\), got "


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (
            (torch.ones(2, 4), torch.ones(2), torch.ones(2, 3)),
            r".*tuple of 3.*\[2, 4\].*\[2\]",
        ),
        ([torch.ones(2, 4)], r".*list of 1.*\(\(ids, mask\)"),
        (  # whose two rows are no pair
            torch.ones(2, 4),
            r"a tensor \[2, 4\]\. Pass several .* TensorDataset\(inputs, targets\).* Or subclass Task",
        ),
        (torch.ones(3, 4), r"a tensor \[3, 4\]\."),
        (np.ones((2, 4)), r"an array \[2, 4\]\."),
        (torch.tensor(1.0), r"a tensor \[\]\. "),
        (3, r"an int\. "),
        (3.0, r"a float\. "),
        ((1.0, 2.0, 3.0), r".*of 3: a float"),
        ((), r"a tuple of 0\."),
        ("ab", r"a str of 2\."),  # nor are its two letters
        (b"ab", r"a bytes of 2\."),
        ({1, 2}, r"a set of 2\."),
        ({"inputs": 1, "targets": 2}, r".*dict with.*\['inputs', 'targets'\].*Supervised"),
    ],
)
def test_a_batch_that_is_not_a_pair_is_refused(batch: Any, found: str) -> None:
    run, task = kit.make_run(Trainer(device="cpu")), kit.linear_classifier()
    for step in (task.training_step, task.validation_step):
        with pytest.raises(TypeError, match=PAIRS + found):
            step(run, batch)


class Power(nn.Module):
    """Takes a number as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.ones(()))

    def forward(self, number: Any) -> Tensor:
        return torch.mul(self.base, number)


def test_batches_without_a_batch_dimension_are_samples() -> None:
    task = Supervised(Power(), lambda outputs, targets: (outputs - targets) ** 2)
    batches = [(torch.tensor(1.0), torch.tensor(2.0)), [torch.tensor(3.0), torch.tensor(4.0)]]
    result = kit.fit(LogSchedule(Every(epochs=1)), task=task, train=batches, optimizer=kit.sgd(0.0))

    assert result.progress.samples == 2
    assert result.metrics["train/loss"] == 1.0


def test_a_loss_by_its_name_is_refused() -> None:
    sentence = r"\(outputs, targets\).*got 'mse_loss'\.$"
    with pytest.raises(TypeError, match=sentence):
        Supervised(nn.Linear(4, 2), "mse_loss")  # type: ignore[arg-type]


def test_metrics_that_are_no_dict_are_refused() -> None:
    metrics: Any = [nn.functional.mse_loss]
    with pytest.raises(TypeError, match="metrics= takes a dict"):
        Supervised(nn.Linear(4, 2), nn.functional.cross_entropy, metrics=metrics)


def test_a_task_may_be_a_plugin_too(tmp_path: Path) -> None:
    """Its handlers run at its place in the list, and what it has as a task and as a plugin is saved."""
    received: list[str] = []

    class Own(Supervised, Plugin):
        @on(BatchStart, BatchEnd)
        def note(self, run: Run, event: BatchStart | BatchEnd) -> None:
            received.append(f"{self.name} {event.name}")

    class Other(Plugin):
        @on(BatchStart, BatchEnd)
        def note(self, run: Run, event: BatchStart | BatchEnd) -> None:
            received.append(f"{self.name} {event.name}")

    model = nn.Linear(4, 2)
    task = Own(model, nn.functional.cross_entropy)
    saves = [SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path)]
    trainer = Trainer([Other().named("before"), task, Other().named("after"), *saves], device="cpu")
    result = kit.fit(trainer, task=task, train=kit.class_batches(1))

    names = ["before", "own", "after"]
    assert received == [f"{name} {event}" for event in ("batch_start", "batch_end") for name in names]
    assert result.last_checkpoint is not None
    saved = torch.load(result.last_checkpoint, weights_only=True)
    assert torch.equal(saved["modules"]["model"]["weight"], model.weight)
    assert "own" in saved["plugins"]


class Detached(Supervised):
    """Returns a loss that leads back to no weight."""

    def training_step(self, run: Run, batch: Any) -> Tensor:
        return super().training_step(run, batch).detach()


def test_a_loss_without_a_gradient_is_explained() -> None:
    with pytest.raises(RuntimeError, match="element 0 of tensors") as raised:
        kit.fit(task=Detached(nn.Linear(4, 2), nn.functional.cross_entropy))
    facts = ("Detached.training_step", "no parameter")
    assert any(has_facts(each, *facts) for each in raised.value.__notes__)
    frozen = nn.Linear(4, 2).requires_grad_(False)
    with pytest.raises(RuntimeError) as raised:
        kit.fit(
            task=Supervised(frozen, nn.functional.cross_entropy),
            optimizer=torch.optim.SGD(frozen.parameters(), lr=0.1),
        )
    assert any("nothing because all parameters" in each for each in raised.value.__notes__)


def test_another_error_is_left_as_it_is() -> None:
    class Fails(Detached):
        def training_step(self, run: Run, batch: Any) -> Tensor:
            raise RuntimeError("element 0 of tensors does not require grad, says the user")

    with pytest.raises(RuntimeError, match="says the user") as raised:
        kit.fit(task=Fails(nn.Linear(4, 2), nn.functional.cross_entropy))
    assert not any("the loss that" in each for each in raised.value.__notes__)
