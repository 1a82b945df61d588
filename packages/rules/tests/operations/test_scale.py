"""ScaleLearningRate: the schedule continues, scaled. ScaleLoss: one batch weighs more or less."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from heliograph import BatchEnd, LearningRate, Run, SavePoint, StepEnd, Trainer, TrainStart
from heliograph.core.system.errors import NotRecorded
from heliograph.events import Lane
from heliograph.packages.tests.facts import assert_each
from heliograph_rules import RuleController
from heliograph_rules.base import RuleFiring
from heliograph_rules.errors import RuleError
from heliograph_rules.operations.requests import ScaleLearningRate
from torch import nn
from torch.optim import lr_scheduler as schedules

Make = Callable[..., Any]
FIRING = RuleFiring("slower", "on_step_end", StepEnd(), "True")
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda optimizer: schedules.ConstantLR(optimizer, factor=0.5, total_iters=4),
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4),
    "cosine_to_a_minimum": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 4, eta_min=0.01),
    "cyclic": lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "exponential": lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    "lambda": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one_cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 0.3, total_steps=12, cycle_momentum=False),
    "restarts": lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 4, eta_min=0.01),
    "several": lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, 6)],
        milestones=[5],
    ),
    "step": lambda optimizer: schedules.StepLR(optimizer, 3, 0.5),
    "together": lambda optimizer: schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, total_iters=2), schedules.ExponentialLR(optimizer, 0.9)]
    ),
}


def fit(
    task: Make, batches: Make, schedule: Any, *, scale_at: tuple[int, ...] = (), saved: Any = None, save_at: int = 0
) -> tuple[list[list[float]], list[Any]]:
    """Train 12 steps of two parameter groups; return the rates of each step and what was saved after `save_at`."""
    mine, rates, kept = task(), [], []
    groups = [{"params": [each], "lr": lr} for each, lr in zip(mine.model.parameters(), (0.1, 0.02), strict=True)]
    optimizer = torch.optim.SGD(groups)
    trainer, operation = Trainer([LearningRate("step")], device="cpu"), ScaleLearningRate("scale", factor=0.5)

    def after_step(run: Run, event: StepEnd) -> None:
        if run.progress.steps in scale_at:
            operation.should_scale(run, FIRING)
        if run.progress.steps == save_at:
            run.control.request_save("for the test")

    trainer.bus.on(StepEnd, lambda run, event: rates.append([each["lr"] for each in optimizer.param_groups]), lane=Lane.TRANSFORM)  # fmt: skip  # noqa: E501
    trainer.bus.on(StepEnd, after_step, lane=Lane.PERSIST)
    trainer.bus.on(SavePoint, lambda run, event: kept.append(deepcopy(run.state_dict())))
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    trainer.fit(mine, batches(12), optimizer=optimizer, scheduler=schedule(optimizer), epochs=1)
    return rates, kept


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_later_rate_is_the_scheduled_one_times_the_factor(task: Make, batches: Make, name: str) -> None:
    schedule = SCHEDULES[name]
    plain, _ = fit(task, batches, schedule)
    scaled, _ = fit(task, batches, schedule, scale_at=(3, 9))
    factors = [1.0] * 3 + [0.5] * 6 + [0.25] * 3
    for before, after, factor in zip(plain, scaled, factors, strict=True):
        assert after == pytest.approx([rate * factor for rate in before], rel=1e-9, abs=1e-15)
    assert len({tuple(rates) for rates in plain}) > 1  # there is a schedule to follow


@pytest.mark.parametrize("name", ["cosine", "lambda", "one_cycle", "several", "step"])
def test_a_resumed_run_stays_scaled(task: Make, batches: Make, name: str) -> None:
    whole, (saved,) = fit(task, batches, SCHEDULES[name], scale_at=(3,), save_at=5)
    resumed, _ = fit(task, batches, SCHEDULES[name], saved=saved)
    assert resumed == whole[5:]


def test_a_plateau_keeps_its_bound() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.2)
    run: Any = SimpleNamespace(optimizers={"optimizer": optimizer}, schedulers={"optimizer": schedule})
    ScaleLearningRate("scale", factor=0.5).should_scale(run, FIRING)
    rates = []
    for value in (1.0, 2.0, 3.0, 4.0):
        schedule.step(value)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.2, 0.2]


@pytest.mark.parametrize(
    ("factor", "minimum", "rates", "expected"),
    [
        (0.5, 0.0, [0.1, 0.02], [0.05, 0.01]),
        (0.5, 0.015, [0.1, 0.02], [0.075, 0.015]),  # alike: no group is brought below it
        (0.5, 0.05, [0.1, 0.02], [0.1, 0.02]),  # one of them is below it already
        (2.0, 0.05, [0.1, 0.02], [0.2, 0.04]),
        (0.5, 0.001, [0.1, 0.0], [0.05, 0.0]),  # a group that is switched off binds nobody
        (0.5, 0.001, [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_no_rate_is_brought_below_the_minimum(
    factor: float, minimum: float, rates: list[float], expected: list[float]
) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    run: Any = SimpleNamespace(optimizers={"optimizer": torch.optim.SGD(groups)}, schedulers={})
    ScaleLearningRate("scale", factor=factor, minimum=minimum).should_scale(run, FIRING)
    assert [group["lr"] for group in run.optimizers["optimizer"].param_groups] == pytest.approx(expected, rel=1e-12)


def test_a_rate_that_is_a_tensor_stays_the_same_object() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    held = optimizer.param_groups[0]["lr"]
    run: Any = SimpleNamespace(optimizers={"optimizer": optimizer}, schedulers={"optimizer": schedule})
    ScaleLearningRate("scale", factor=0.5).should_scale(run, FIRING)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.25
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"].item() == 0.125


def test_one_of_several_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    several = {name: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for name in ("generator", "critic")}
    run: Any = SimpleNamespace(optimizers=several, schedulers={})
    with caplog.at_level(logging.INFO, "heliograph"):
        ScaleLearningRate("scale", factor=0.5, optimizer="critic").should_scale(run, FIRING)
    assert {name: each.param_groups[0]["lr"] for name, each in several.items()} == {"generator": 1.0, "critic": 0.5}
    assert_each(caplog.messages, ("'critic' scaled by 0.5", "to 0.5", "rule 'slower'", "on_step_end: True"))
    ScaleLearningRate("scale", factor=0.5).should_scale(run, FIRING)
    assert {name: each.param_groups[0]["lr"] for name, each in several.items()} == {"generator": 0.5, "critic": 0.25}
    with pytest.raises(RuleError, match=r"optimizer 'critics'.* Did you"):
        ScaleLearningRate("scale", factor=0.5, optimizer="critics").should_scale(run, FIRING)


def test_in_a_replay_nothing_is_touched() -> None:
    class Replayed:
        optimizers: ClassVar[Any] = {"optimizer": SimpleNamespace(param_groups=[{"lr": 1.0}])}

        @property
        def schedulers(self) -> Any:
            raise NotRecorded("the schedulers")

    run: Any = Replayed()
    with pytest.raises(NotRecorded, match="the schedulers"):
        ScaleLearningRate("scale", factor=0.5).should_scale(run, FIRING)
    assert run.optimizers["optimizer"].param_groups == [{"lr": 1.0}]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"factor": 0}, "factor must be"),
        ({"factor": "half"}, "factor must be"),
        ({"factor": True}, "factor must be"),
        ({"factor": float("nan")}, "factor must be"),
        ({"factor": float("inf")}, "factor must be"),
        ({"factor": 0.5, "minimum": -1}, "minimum must be"),
        ({"factor": 0.5, "minimum": None}, "minimum must be"),
        ({"factor": 0.5, "optimizer": 3}, "optimizer must be"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(RuleError, match=problem):
        ScaleLearningRate("scale", **arguments)


def test_all_ranks_must_agree_to_scale() -> None:
    operation = ScaleLearningRate("scale", factor=0.5)
    assert operation.shared
    assert list(operation.actions()) == ["should_scale"]


def test_the_loss_of_a_batch_is_scaled_where_the_rule_says_so(task: Make, batches: Make) -> None:
    source = {
        "controller_metrics": [{"name": "state", "class": "TrainingState"}],
        "operations": [{"name": "less", "class": "ScaleLoss", "arguments": {"factor": 0.25}}],
        "controllers": [
            {
                "name": "second",
                "triggers": ["batch_start"],
                "rule": "state.batch == 1",
                "operations": ["less.should_scale"],
            }
        ],
    }
    trainer, scales = Trainer([RuleController(source)], device="cpu"), []
    trainer.bus.on(BatchEnd, lambda run, event: scales.append(run.control.loss_scale))
    mine = task()
    result = trainer.fit(mine, batches(3), optimizer=torch.optim.SGD(mine.model.parameters(), lr=0.1), epochs=1)
    assert scales == [1.0, 0.25, 1.0]
    assert [(each.verb, each.by, each.batch, each.event) for each in result.history] == [
        ("scale_loss", "rule_controller", 1, "batch_start")
    ]


def test_a_loss_is_scaled_at_the_start_of_a_batch_only_and_by_a_number() -> None:
    part = {"name": "less", "class": "ScaleLoss", "arguments": {"factor": 2}}
    rule = {"name": "a", "triggers": ["on_log"], "rule": "True", "operations": ["less.should_scale"]}
    with pytest.raises(RuleError, match="on_log"):
        RuleController({"operations": [part], "controllers": [rule]})
    with pytest.raises(RuleError, match=r"factor must .*got 'x'"):
        RuleController({"operations": [{**part, "arguments": {"factor": "x"}}], "controllers": [rule]})
