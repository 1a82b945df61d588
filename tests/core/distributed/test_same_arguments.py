"""What ranks are given must be the same; their plugins need not be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import random_batches
from heliograph.tests.messages import assert_each, assert_facts
from heliograph.tests.ranks_pool import Pool
from torch import nn

Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD = torch.optim.SGD


def optimizer(**options: Any) -> Optimizer:
    return lambda parameters: SGD(parameters, **{"lr": 0.1, **options})


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    weight, bias = parameters
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.5}]
    return SGD(groups, lr=0.1)


def adam(*betas: float, lr: Any = 0.1) -> Optimizer:
    first, second = betas
    return lambda parameters: torch.optim.Adam(parameters, lr=lr, betas=(first, second))


SETS = random_batches(4, seed=1)
VALIDATED: dict[str, Any] = {"validation": {"small": SETS}}
GIVEN: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str, str]] = {
    "epochs": ({"epochs": 1}, {"epochs": 1.5}, "epochs=1", "epochs=1.5"),
    "steps": ({"steps": 4}, {"steps": 2}, "steps=4", "steps=2"),
    "skips": ({}, {"max_skipped_steps": 5}, "max_skipped_steps=100", "max_skipped_steps=5"),
    "sets": (VALIDATED, {}, "the validation set 'small'", "no sets to validate on"),
    "limits": (
        VALIDATED,
        {**VALIDATED, "limit_validation": {"small": 2}},
        "the validation set 'small'",
        "the validation set 'small' with limit 2",
    ),
    "class": (
        {},
        {"optimizer": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1)},
        "the optimizer SGD with 1 parameter group, no scheduler",
        "the optimizer Adagrad with 1 parameter group, no scheduler",
    ),
    "groups": (
        {},
        {"optimizer": two_groups},
        "the optimizer SGD with 1 parameter group, no scheduler",
        "the optimizer SGD with 2 parameter groups, no scheduler",
    ),
    "rate": (
        {},
        {"optimizer": optimizer(lr=0.2)},
        "lr=0.1 in parameter group 0 of the optimizer",
        "lr=0.2 in parameter group 0 of the optimizer",
    ),
    "tensor": (
        {"optimizer": adam(0.5, 0.75, lr=torch.tensor(0.5))},
        {"optimizer": adam(0.5, 0.75, lr=torch.tensor(0.25))},
        "lr=0.5 in parameter group 0 of the optimizer",
        "lr=0.25 in parameter group 0 of the optimizer",
    ),
    "pair": (
        {"optimizer": adam(0.5, 0.75)},
        {"optimizer": adam(0.5, 0.5)},
        "betas=(0.5, 0.75) in parameter group 0 of the optimizer",
        "betas=(0.5, 0.5) in parameter group 0 of the optimizer",
    ),
    "scheduler": (
        {"scheduler": lambda made, steps: torch.optim.lr_scheduler.ConstantLR(made)},
        {},
        "the optimizer SGD with 1 parameter group, the scheduler ConstantLR",
        "the optimizer SGD with 1 parameter group, no scheduler",
    ),
}


def task() -> h.Supervised:
    torch.manual_seed(0)
    return h.Supervised(nn.Linear(4, 2), nn.functional.mse_loss)


def fit(given: Mapping[str, Any], *plugins: Any) -> h.RunResult:
    options = {"optimizer": optimizer(), "epochs": None if "steps" in given else 1, **given}
    asked: list[Any] = [h.ValidationSchedule(epochs=1)] if "validation" in given else []
    asked += [h.LearningRate("step")] if "scheduler" in given else []
    trainer = h.Trainer([*asked, *plugins], engine=h.DDPEngine(device="cpu", timeout=20))
    return trainer.fit(task(), random_batches(8), **options)


def fit_with(what: str) -> tuple[str, str]:
    given, other, *_ = GIVEN[what]
    with pytest.raises(ValueError, match="The arguments of the run are not the same on all ranks: ") as caught:
        fit(given if os.environ["RANK"] == "0" else other)
    return str(caught.value), fit(given).status


@pytest.mark.parametrize("what", GIVEN)
def test_what_differs_between_ranks_is_refused_when_the_run_begins(ranks: Pool, what: str) -> None:
    *_, first, second = GIVEN[what]
    for message, status in ranks(2).run(fit_with, what):
        assert_facts(message, "not the same", f"rank 0 has {first}", f"rank 1 has {second}")
        assert status == "completed"


def evaluate(limits: tuple[int, int]) -> Mapping[str, float] | str:
    trainer = h.Trainer(engine=h.DDPEngine(device="cpu", timeout=20))
    try:
        return trainer.validate(task(), SETS, limit=limits[int(os.environ["RANK"])]).metrics
    except ValueError as error:
        return str(error)


def test_an_evaluation_compares_its_limits(ranks: Pool) -> None:
    refused, same = ranks(2).run(evaluate, (2, 3)), ranks(2).run(evaluate, (2, 2))
    assert_each(refused, *[("rank 0 has", "limit 2", "rank 1 has", "limit 3")] * 2)
    assert same[0] == same[1]
    assert list(same[0]) == ["validation/loss"]


class Spread(h.Plugin):
    """Reduces something at the end of an epoch, on the ranks that have it."""

    @h.on(h.EpochEnd)
    def measure(self, run: h.Run, event: h.EpochEnd) -> None:
        run.track("ranks", run.engine.reduce(1, "sum"))


class Counts(h.Plugin):
    """Counts epochs, and asks for an end."""

    asks = ("stop",)
    count = 0

    @h.on(h.EpochEnd)
    def measure(self, run: h.Run, event: h.EpochEnd) -> None:
        self.count += 1
        run.control.stop("because")


def fit_with_plugins(how: str) -> tuple[str, ...]:
    is_first = os.environ["RANK"] == "0"
    plugins: list[Any] = [Counts()] if how == "counts" else [Spread()]
    trainer = h.Trainer(plugins if is_first or how == "disabled" else [], engine=h.DDPEngine(device="cpu", timeout=20))
    if how == "disabled" and not is_first:
        trainer.plugins.disable("spread")
    try:
        result = trainer.fit(task(), random_batches(8), optimizer=optimizer(), epochs=2)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return result.status, str(result.stopped_by), str(result.progress.epoch), str(sum(each.count for each in plugins))


@pytest.mark.parametrize("how", ["absent", "disabled"])
def test_a_plugin_of_some_ranks_that_exchanges_is_named(ranks: Pool, how: str) -> None:
    first, second = ranks(2).run(fit_with_plugins, how)
    kind, message = first
    assert kind == "RuntimeError"
    assert "calls reduce on epoch_end" in message
    assert second[0] == "RankFailed"
    assert_facts(second[1], "rank 0", "RuntimeError", message, "in train")


def test_a_plugin_of_some_ranks_that_does_not_exchange_is_allowed(ranks: Pool) -> None:
    assert ranks(2).run(fit_with_plugins, "counts") == [
        ("stopped", "counts", "1", "1"),
        ("stopped", "counts", "1", "0"),
    ]
