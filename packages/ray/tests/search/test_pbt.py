"""Hyper-parameters that Tune has changed replace those in the checkpoint, and schedules continue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import Checkpoint, Every, LearningRate, RunResult, SaveSchedule, Supervised, Trainer
from heliograph_ray.search.pbt import Tune
from heliograph_testing import check_plugin
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

Scheduler = Callable[[Optimizer], Any]


def fit(
    folder: Path,
    optimizer: Callable[[Any], Optimizer],
    scheduler: Scheduler | None,
    *,
    steps: int,
    tune: bool = True,
) -> tuple[RunResult, Optimizer, Any]:
    """Resume what is in the folder and train; return the result, the optimizer and the scheduler."""
    torch.manual_seed(0)
    task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    data = [(torch.randn(4, 4), torch.randn(4, 2)) for _ in range(5)]
    chosen = optimizer(task.model.parameters())
    schedule = None if scheduler is None else scheduler(chosen)
    plugins = [SaveSchedule(Every(steps=1)), Checkpoint(folder, resume="auto", keep_last=None)]
    stepping = [] if schedule is None else [LearningRate("step")]
    trainer = Trainer([*plugins, *stepping, *([Tune()] if tune else [])], use_cpu=True)
    result = trainer.fit(task, data, optimizer=chosen, scheduler=schedule, steps=steps)
    return result, chosen, schedule


@pytest.mark.parametrize("rate", [0.1, 0.03])
def test_a_changed_learning_rate_of_the_program_is_applied(tmp_path: Path, rate: float) -> None:
    fit(tmp_path, lambda each: SGD(each, lr=0.1, momentum=0.9), None, steps=3)
    result, optimizer, _ = fit(tmp_path, lambda each: SGD(each, lr=rate, momentum=0.9), None, steps=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert len(optimizer.state) == 2  # the momenta are still the checkpoint's
    assert (any("checkpoint: lr 0.1 ->" in line for line in result.notes)) == (rate == 0.03)


def test_other_changed_options_of_an_optimizer_are_applied(tmp_path: Path) -> None:
    fit(tmp_path, lambda each: AdamW(each, lr=0.1, weight_decay=0.1), None, steps=3)

    def changed(parameters: Any) -> Optimizer:
        return AdamW(parameters, lr=0.1, weight_decay=0.5, betas=(0.8, 0.9))

    result, optimizer, _ = fit(tmp_path, changed, None, steps=3)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.5, (0.8, 0.9))
    assert any("(0.9, 0.999) -> (0.8," in line for line in result.notes)


def test_each_parameter_group_is_changed_by_itself(tmp_path: Path) -> None:
    def made(*rates: float) -> Callable[[Any], Optimizer]:
        return lambda each: SGD([{"params": [one], "lr": rate} for one, rate in zip(each, rates, strict=True)], lr=1.0)

    def scheduled(optimizer: Optimizer) -> Any:
        return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    fit(tmp_path, made(0.1, 0.2), scheduled, steps=2)
    _, optimizer, scheduler = fit(tmp_path, made(0.1, 0.4), scheduled, steps=3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0125, 0.05])
    assert scheduler.base_lrs == pytest.approx([0.1, 0.4])


SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda of: lr_scheduler.StepLR(of, 2, gamma=0.5),
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 8),
    "lambda": lambda of: lr_scheduler.LambdaLR(of, lambda step: 1 / (1 + step)),
    "one cycle": lambda of: lr_scheduler.OneCycleLR(of, 10 * of.param_groups[0]["lr"], total_steps=10),
    "warm-up": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, 0.1, total_iters=3), lr_scheduler.ExponentialLR(of, 0.9)], [3]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(of, 0.5, 3), lr_scheduler.ExponentialLR(of, 0.9)], of
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_continues_with_the_changed_rate(tmp_path: Path, kind: str) -> None:
    """The resumed schedule equals that of a run which had the changed rate from the start."""

    def run(folder: Path, rate: float, steps: int) -> tuple[Optimizer, Any]:
        return fit(folder, lambda each: SGD(each, lr=rate), SCHEDULERS[kind], steps=steps)[1:]

    run(tmp_path / "cloned", 0.1, 4)
    cloned, schedule = run(tmp_path / "cloned", 0.3, 7)
    whole, expected = run(tmp_path / "whole", 0.3, 7)
    assert cloned.param_groups[0]["lr"] == pytest.approx(whole.param_groups[0]["lr"])
    assert cloned.param_groups[0]["lr"] > 0
    for name in {"base_lrs", "last_epoch", "_last_lr"} & schedule.state_dict().keys():
        assert getattr(schedule, name) == pytest.approx(getattr(expected, name)), name


def test_changed_options_of_a_scheduler_are_applied(tmp_path: Path) -> None:
    def fitted(gamma: float, steps: int) -> tuple[RunResult, Optimizer, Any]:
        return fit(
            tmp_path,
            lambda each: SGD(each, lr=1.0),
            lambda of: lr_scheduler.StepLR(of, 1, gamma=gamma),
            steps=steps,
        )

    fitted(0.5, 2)
    result, optimizer, _ = fitted(0.1, 3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert any("checkpoint: gamma 0.5 ->" in line for line in result.notes)


def test_the_next_checkpoint_has_the_options_of_the_last_program(tmp_path: Path) -> None:
    """Otherwise a third program would apply the same change again."""
    for steps, rate in ((1, 0.1), (2, 0.2), (3, 0.2)):
        result, optimizer, _ = fit(tmp_path, partial(SGD, lr=rate), None, steps=steps)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
    assert not any("changed by tune" in note for note in result.notes)


def test_a_checkpoint_without_options_is_not_changed(tmp_path: Path) -> None:
    fit(tmp_path, lambda each: SGD(each, lr=0.1), None, steps=1, tune=False)
    _, optimizer, _ = fit(tmp_path, lambda each: SGD(each, lr=0.5), None, steps=2)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_learning_rate_of_0_is_not_changed(tmp_path: Path) -> None:
    fit(tmp_path, lambda each: SGD(each, lr=0.0), None, steps=1)
    _, optimizer, _ = fit(tmp_path, lambda each: SGD(each, lr=0.5), None, steps=2)
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_its_state_loads_with_weights_only(tmp_path: Path) -> None:
    result, *_ = fit(
        tmp_path,
        lambda each: SGD(each, lr=torch.tensor(0.1)),
        lambda of: lr_scheduler.MultiStepLR(of, [1, 3]),
        steps=2,
    )
    assert result.last_checkpoint is not None
    saved = torch.load(result.last_checkpoint, weights_only=True)["plugins"]["tune"]
    assert saved["optimizers"]["optimizer"][0]["lr"] == pytest.approx(0.1)
    assert saved["schedulers"]["optimizer"]["milestones"] == {1: 1, 3: 1}


def test_it_conforms() -> None:
    check_plugin(Tune)
