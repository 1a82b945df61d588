"""The global batch: how many samples make a step, and how learning rates follow a change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from heliograph import (
    Checkpoint,
    Every,
    GradientAccumulation,
    GradientsReady,
    LearningRate,
    Plugin,
    Resume,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    on,
)
from heliograph.core.checkpoint.compatibility import scale_optimizer, scale_scheduler
from heliograph.core.checkpoint.schema import global_batch
from heliograph.core.checkpoint.storage import reader
from heliograph.tests.messages import has_facts
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LinearLR, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize(
    ("world", "size"),
    [
        ({"size": 2, "batch_size": 4, "accumulation": 3}, 24),
        ({"size": 1, "batch_size": 1, "accumulation": 1}, 1),
        ({"size": 2, "batch_size": None, "accumulation": 1}, None),
        ({"size": 2, "batch_size": 4, "accumulation": None}, None),
        ({"size": 1}, None),
    ],
)
def test_the_global_batch(world: dict[str, int | None], size: int | None) -> None:
    assert global_batch(world) == size


def sgd(rate: float | torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate, momentum=0.9)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2, 0.5),
        lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=20),
        lambda optimizer: CyclicLR(optimizer, 0.1, 1.0, step_size_up=3),
        lambda optimizer: SequentialLR(optimizer, [LinearLR(optimizer, 0.1), StepLR(optimizer, 2)], milestones=[3]),
    ],
)
def test_a_scaled_scheduler_stays_scaled(make: Any) -> None:
    runs = [sgd(1.0), sgd(1.0)]
    schedulers = [make(optimizer) for optimizer in runs]
    for optimizer, scheduler in zip(runs, schedulers, strict=True):
        rates(optimizer, scheduler, 2)
    scale_optimizer(runs[1], 3.0)
    scale_scheduler(schedulers[1], 3.0)
    assert schedulers[1].get_last_lr() == pytest.approx([3 * rate for rate in schedulers[0].get_last_lr()])
    expected = [3 * rate for rate in rates(runs[0], schedulers[0], 5)]
    assert rates(runs[1], schedulers[1], 5) == pytest.approx(expected)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = sgd(rate)
    scale_optimizer(optimizer, 2.0)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 1.0


def fit(checkpoint: Checkpoint, batch_size: int, *plugins: Any, steps: int = 2) -> tuple[RunResult, Any]:
    torch.manual_seed(0)
    task = Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    data = TensorDataset(torch.arange(16.0)[:, None] / 16, torch.ones(16, 1))
    optimizer = sgd(0.5)
    optimizer.param_groups[0]["params"] = list(task.model.parameters())
    trainer = Trainer([SaveSchedule(Every(epochs=1)), LearningRate("step"), *plugins, checkpoint], device="cpu")
    scheduler = StepLR(optimizer, 100)
    loader = DataLoader(data, batch_size=batch_size)
    result = trainer.fit(task, loader, optimizer=optimizer, scheduler=scheduler, steps=steps)
    return result, scheduler


@pytest.mark.parametrize(("change", "factor"), [("linear", 2.0), ("sqrt", 2**0.5), ("keep", 1.0)])
def test_one_process_scales_if_asked_to(tmp_path: Any, change: Any, factor: float) -> None:
    fit(Checkpoint(tmp_path), 8)  # which ends an epoch
    resumed, scheduler = fit(Checkpoint(tmp_path, resume=Resume("auto", batch_change=change)), 16, steps=3)
    assert resumed.progress.steps == 3
    assert scheduler.base_lrs == scheduler.get_last_lr() == [0.5 * factor]
    facts = ("batch_size 8", "accumulation 1", "batch_size 16", "accumulation 1")
    assert any(has_facts(line, *facts) for line in resumed.notes)


@pytest.mark.parametrize(("size", "number", "now"), [(8, 2, "8 x accumulation 2"), (16, 1, "16 x accumulation 1")])
def test_a_change_in_one_process_is_noted_and_no_error(tmp_path: Any, size: int, number: int, now: str) -> None:
    fit(Checkpoint(tmp_path), 8)
    resumed, scheduler = fit(Checkpoint(tmp_path, resume="auto"), size, GradientAccumulation(number), steps=3)
    assert scheduler.base_lrs == [0.5]
    facts = ("batch_size 8", "accumulation 1", f"batch_size {now}")
    assert any(has_facts(line, *facts, "learning rates") for line in resumed.notes)
    assert resumed.resume is not None
    assert resumed.resume.reasons
    assert any(has_facts(reason, *facts) for reason in resumed.resume.reasons)


def test_the_same_product_of_other_factors_is_no_change(tmp_path: Any) -> None:
    fit(Checkpoint(tmp_path), 8)
    resumed, _ = fit(Checkpoint(tmp_path, resume="auto"), 4, GradientAccumulation(2), steps=3)
    assert resumed.resume is not None
    assert not any("global batch" in line for line in (*resumed.notes, *resumed.resume.reasons))


class Stream:
    """Batches of which nobody knows the size beforehand."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2, 1), torch.ones(2, 1))] * 4)


def stream(checkpoint: Checkpoint, number: int, steps: int) -> tuple[RunResult, float]:
    task = Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    plugins = [SaveSchedule(Every(epochs=1)), GradientAccumulation(number), checkpoint]
    result = Trainer(plugins, device="cpu").fit(task, Stream(), optimizer=optimizer, steps=steps)
    return result, optimizer.param_groups[0]["lr"]


def test_an_unknown_batch_is_not_scaled(tmp_path: Any) -> None:
    stream(Checkpoint(tmp_path), 2, 2)
    resumed, rate = stream(Checkpoint(tmp_path, resume=Resume("auto", batch_change="linear")), 4, 3)
    facts = ("batch_size unknown", "accumulation 2", "batch_size unknown", "accumulation 4")
    assert any(has_facts(line, *facts) for line in resumed.notes)
    assert resumed.resume is not None
    assert any(has_facts(reason, *facts) for reason in resumed.resume.reasons)
    assert rate == 0.5


class Once(Plugin):
    """Goes back to a state at the first step."""

    asks = ("skip_step",)

    def __init__(self, state: dict[str, Any]) -> None:
        self.state: dict[str, Any] | None = state

    @on(GradientsReady)
    def go_back(self, run: Run, event: GradientsReady) -> None:
        if self.state is not None:
            run.control.skip_step("it goes back")
            run.roll_back(self.state)
            self.state = None


def test_a_return_to_what_the_run_was_resumed_from_is_scaled_too(tmp_path: Any) -> None:
    path = fit(Checkpoint(tmp_path), 8)[0].last_checkpoint
    assert path is not None
    checkpoint = Checkpoint(tmp_path, resume=Resume("auto", batch_change="linear"))
    _, scheduler = fit(checkpoint, 16, Once(reader.load(path)), steps=3)
    assert scheduler.base_lrs == [1.0]


def test_what_to_do_is_checked() -> None:
    with pytest.raises(ValueError, match="linear, sqrt; got 'double'"):
        Resume(batch_change="double")  # type: ignore[arg-type]  # what is tested
