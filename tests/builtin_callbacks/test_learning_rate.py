"""LearningRate against schedulers stepped by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    At,
    BatchStart,
    Every,
    GradientAccumulation,
    GradientsReady,
    Lane,
    LearningRate,
    Log,
    LogSchedule,
    Run,
    SavePoint,
    SaveSchedule,
    StepEnd,
    Task,
    TrainEnd,
    Trainer,
    TrainStart,
    ValidationSchedule,
)
from heliograph.core.task import Losses
from heliograph.tests import kit
from heliograph.tests.messages import assert_each, assert_facts
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

Make = Callable[..., Any]


def rate(run: Run) -> float:
    return float(run.optimizer.param_groups[0]["lr"])


def record(trainer: Trainer) -> list[float]:
    """Record the learning rate with which each step was taken."""
    rates: list[float] = []
    trainer.bus.on(StepEnd, lambda run, event: rates.append(rate(run)), lane=Lane.TRANSFORM)
    return rates


@pytest.mark.parametrize(("per", "n"), [("step", 1), ("step", 2), ("epoch", 1), ("epoch", 3)])
def test_equals_a_loop_by_hand(task: Make, batches: Make, sgd: Any, weights: Any, per: Any, n: int) -> None:
    data, mine, theirs = batches(5), task(), task()
    optimizer = sgd(list(mine.model.parameters()))
    trainer = Trainer([LearningRate(per), GradientAccumulation(n)], device="cpu")
    rates = record(trainer)
    trainer.fit(mine, data, optimizer=optimizer, scheduler=CosineAnnealingLR(optimizer, 7), epochs=3)

    by_hand: list[float] = []
    optimizer = sgd(list(theirs.model.parameters()))
    scheduler = CosineAnnealingLR(optimizer, 7)
    for _ in range(3):
        for start in range(0, 5, n):
            window = data[start : start + n]
            for inputs, targets in window:
                (nn.functional.mse_loss(theirs.model(inputs), targets) / len(window)).backward()  # type: ignore[no-untyped-call]
            by_hand.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            optimizer.zero_grad()
            if per == "step":
                scheduler.step()
        if per == "epoch":
            scheduler.step()

    assert rates == by_hand
    assert all(map(torch.equal, weights(mine), weights(theirs)))


def fit_plateau(
    scripted: Make, batches: Make, values: list[float], mode: Any = "min", monitor: str = "validation/loss"
) -> list[float]:
    mine = scripted(values)
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, mode, factor=0.1, patience=1)
    plugins = [LearningRate("plateau", monitor=monitor), ValidationSchedule(Every(epochs=1))]
    trainer = Trainer(plugins, device="cpu")
    rates = record(trainer)
    trainer.fit(mine, batches(1), validation=batches(1), optimizer=optimizer, scheduler=scheduler, epochs=len(values))
    return rates


def test_plateau(scripted: Make, batches: Make) -> None:
    rates = fit_plateau(scripted, batches, [1.0, 0.5, 0.6, 0.7, 0.8, 0.9])

    assert rates == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_an_improvement_for_a_plateau(scripted: Make, batches: Make, mode: str) -> None:
    rates = fit_plateau(scripted, batches, [1.0, math.nan, math.nan, math.nan], mode)

    assert rates == pytest.approx([1.0, 1.0, 1.0, 0.1])


def test_plateau_lists_the_metrics_where_its_own_is_missing(scripted: Make, batches: Make) -> None:
    with pytest.raises(ValueError, match=r"metric 'validation/los'. Did"):
        fit_plateau(scripted, batches, [1.0], monitor="validation/los")


def test_plateau_without_validation_data(task: Make, batches: Make) -> None:
    mine = task()
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    trainer = Trainer([LearningRate("plateau", monitor="validation/loss")], device="cpu")

    with pytest.raises(ValueError, match="without validation data"):
        trainer.fit(mine, batches(1), optimizer=optimizer, scheduler=ReduceLROnPlateau(optimizer), epochs=1)


def test_a_plateau_of_a_train_metric_steps_or_is_refused(task: Make, batches: Make) -> None:
    """What never steps the scheduler must not be accepted in silence."""
    mine = task()
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs")
    try:
        trainer = Trainer([LearningRate("plateau", monitor="train/loss"), LogSchedule(Every(epochs=1))], device="cpu")
        trainer.fit(mine, batches(2), optimizer=optimizer, scheduler=scheduler, epochs=4)
    except ValueError:
        return
    assert optimizer.param_groups[0]["lr"] < 0.5


def test_a_validation_before_any_step_does_not_count(scripted: Make, batches: Make) -> None:
    mine = scripted([1.0, 2.0, 3.0])
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    plugins = [
        LearningRate("plateau", monitor="validation/loss"),
        ValidationSchedule(Every(epochs=1), at_start=True),
    ]
    Trainer(plugins, device="cpu").fit(
        mine, batches(1), validation=batches(1), optimizer=optimizer, scheduler=scheduler, epochs=2
    )

    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def fit_skipping(task: Make, batches: Make, per: Any, event: Any, first: int, last: int, epochs: int) -> Any:
    """Drop the steps of the batches first to last, counted over all epochs; return the scheduler."""
    mine = task()
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer([LearningRate(per)], device="cpu")

    def drop(run: Run, event: BatchStart | GradientsReady) -> None:
        if first <= run.progress.batches <= last:
            ask = run.control.skip_batch if isinstance(event, BatchStart) else run.control.skip_step
            ask("the test says so")

    trainer.bus.on(event, drop)
    trainer.fit(mine, batches(3), optimizer=optimizer, scheduler=scheduler, epochs=epochs)
    return scheduler


@pytest.mark.parametrize("event", [BatchStart, GradientsReady])
def test_never_stepped_where_the_optimizer_was_not(task: Make, batches: Make, event: Any) -> None:
    assert fit_skipping(task, batches, "step", event, 1, 2, 1).last_epoch == 1


@pytest.mark.parametrize("event", [BatchStart, GradientsReady])
@pytest.mark.parametrize(("first", "last", "expected"), [(0, 2, 1), (3, 5, 1), (3, 4, 2), (0, 5, 0)])
def test_an_epoch_without_a_step_is_not_stepped(
    task: Make, batches: Make, event: Any, first: int, last: int, expected: int
) -> None:
    assert fit_skipping(task, batches, "epoch", event, first, last, 2).last_epoch == expected


def test_a_resume_at_the_last_batch_of_an_epoch_still_steps_the_epoch(task: Make, batches: Make) -> None:
    """The cut at the boundary after an epoch's last batch lies before its EpochEnd."""
    saved: dict[str, Any] = {}

    def fit(*, resumed: bool) -> list[float]:
        mine = task()
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
        trainer = Trainer([LearningRate("epoch"), SaveSchedule(At(steps=3), at_end=False)], device="cpu")
        rates = record(trainer)
        if resumed:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        else:
            trainer.bus.on(SavePoint, lambda run, event: saved.update(deepcopy(run.state_dict())))
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        trainer.fit(mine, batches(3), optimizer=optimizer, scheduler=scheduler, epochs=3)
        return rates

    assert fit(resumed=False) == [1.0] * 3 + [0.5] * 3 + [0.25] * 3
    assert (saved["progress"]["epoch"], saved["progress"]["batch"]) == (0, 3)
    assert fit(resumed=True) == [0.5] * 3 + [0.25] * 3


def test_the_log_has_the_rate_of_the_next_step(task: Make, batches: Make) -> None:
    mine = task()
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    trainer = Trainer([LearningRate("step"), LogSchedule(At(steps=[1, 3]))], device="cpu")
    logged: list[float] = []
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics["train/learning_rate"]))
    trainer.fit(mine, batches(3), optimizer=optimizer, scheduler=StepLR(optimizer, 1, gamma=0.5), epochs=1)

    assert logged == [0.5, 0.125]


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "expected"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(OneCycleLR, max_lr=0.1), [0.85, 0.95]),
        (partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.99)), partial(OneCycleLR, max_lr=0.1), [0.85, 0.95]),
        (torch.optim.SGD, partial(OneCycleLR, max_lr=0.1, cycle_momentum=False), []),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), None, []),
    ],
    ids=["momentum", "betas", "not moved", "nothing that moves it"],
)
def test_the_log_has_a_momentum_that_the_scheduler_moves(
    task: Make, batches: Make, optimizer: Any, scheduler: Any, expected: list[float]
) -> None:
    logged: list[float] = []

    def note(run: Run, event: Log) -> None:
        logged.extend(value for name, value in event.metrics.items() if name == "train/momentum")

    def make(given: Any, steps: int) -> Any:
        return scheduler(given, total_steps=steps + 1, pct_start=0.6) if scheduler else StepLR(given, 1)

    trainer = Trainer([LearningRate("step"), LogSchedule(At(steps=[2, 4]))], device="cpu")
    trainer.bus.on(Log, note)
    trainer.fit(task(), batches(4), optimizer=optimizer, scheduler=make, epochs=1)

    assert logged == pytest.approx(expected)


def test_a_missing_scheduler_is_an_error_at_the_start(task: Make, batches: Make, sgd: Any) -> None:
    trainer = Trainer([LearningRate("step")], device="cpu")
    with pytest.raises(ValueError, match="given none: pass scheduler="):
        trainer.fit(task(), batches(), optimizer=sgd, epochs=1)


def test_a_scheduler_without_the_plugin_is_an_error(task: Make, batches: Make) -> None:
    mine = task()
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"steps .*: add LearningRate"):
        Trainer(device="cpu").fit(mine, batches(), optimizer=optimizer, scheduler=StepLR(optimizer, 1), epochs=1)


def test_two_learning_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="both claim scheduler"):
        Trainer([LearningRate("step"), LearningRate("epoch").named("other")], device="cpu")


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (["batch"], {}, "'step', 'epoch' or 'plateau'"),
        (["plateau"], {}, "monitor=.*required for 'plateau'"),
        (["step"], {"monitor": "validation/loss"}, "monitor=.*required for 'plateau'"),
    ],
)
def test_arguments_are_checked(arguments: list[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LearningRate(*arguments, **options)


def test_two_fits_and_a_test(task: Make, batches: Make) -> None:
    trainer = Trainer([LearningRate("epoch")], device="cpu")
    for _ in range(2):
        mine = task()
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        trainer.fit(mine, batches(2), optimizer=optimizer, scheduler=scheduler, epochs=3)
        trainer.test(mine, batches(1))
        assert scheduler.last_epoch == 3


def test_the_scheduler_is_resumed(task: Make, batches: Make) -> None:
    saved: dict[str, Any] = {}
    last: list[float] = []
    for epochs in (2, 4):
        mine = task()
        optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        trainer = Trainer([LearningRate("epoch")], device="cpu")
        if saved:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        rates = record(trainer)
        trainer.bus.on(TrainEnd, lambda run, event: saved.update(run.state_dict()))
        trainer.fit(mine, batches(2), optimizer=optimizer, scheduler=scheduler, epochs=epochs)
        last = rates

    assert last == [0.25, 0.25, 0.125, 0.125]


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_warm_up_before_another_scheduler_is_resumed(task: Make, batches: Make, tmp_path: Path, cut: int) -> None:
    """The file holds the states of both, nested, and no object: it is read with `weights_only`."""

    def warmed_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
        parts = [LinearLR(optimizer, 0.25, total_iters=2), CosineAnnealingLR(optimizer, 4)]
        return SequentialLR(optimizer, parts, milestones=[2])

    def rates_of(folder: str, steps: int) -> list[float]:
        plugins = kit.saving(tmp_path / folder, Every(steps=1), resume="auto")
        trainer = Trainer([LearningRate("step"), *plugins], device="cpu")
        rates = record(trainer)
        optimizer = partial(torch.optim.SGD, lr=1.0)
        result = trainer.fit(task(), batches(3), optimizer=optimizer, scheduler=warmed_up, steps=steps)
        assert result.last_checkpoint is not None
        saved = torch.load(result.last_checkpoint, weights_only=True)
        assert len(saved["schedulers"]["optimizer"]["_schedulers"]) == 2
        return rates

    whole = rates_of("whole", 6)
    assert whole[:4] == pytest.approx([0.25, 0.625, 1.0, 0.5 * (1 + math.cos(math.pi / 4))])
    assert rates_of("parts", cut) + rates_of("parts", 6) == whole


def test_a_validation_is_nothing_to_a_schedule_by_steps(scripted: Make, batches: Make) -> None:
    mine = scripted([1.0, 2.0])
    optimizer = torch.optim.SGD(mine.model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer([LearningRate("step"), ValidationSchedule(Every(epochs=1))], device="cpu")
    trainer.fit(mine, batches(3), validation=batches(1), optimizer=optimizer, scheduler=scheduler, epochs=2)

    assert scheduler.last_epoch == 6


def fit_to_the_end(scheduler: Any, per: Any = "step", *, steps: int = 6, **options: Any) -> tuple[str, ...]:
    """Return the warnings of a run of two epochs of three batches, with learning rates of 0.1."""
    return kit.fit(
        LearningRate(per), train=kit.class_batches(3), scheduler=scheduler, steps=steps, epochs=2, **options
    ).warnings


def in_sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    """Return a warm-up of two steps, then a cosine of three."""
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 3)], [2])


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (
            partial(CosineAnnealingLR, T_max=4),
            ("CosineAnnealingLR", "beyond its length", "6 times", "T_max=4"),
        ),
        (in_sequence, ("SequentialLR", "beyond its length", "4 times", "T_max=3")),
        (
            partial(PolynomialLR, total_iters=5),
            ("6 times", "total_iters=5", "learning rate is 0"),
        ),
        (partial(LinearLR, end_factor=0.0, total_iters=5), ("6 times", "total_iters=5")),
    ],
)
def test_a_scheduler_that_went_on_past_its_length_is_a_warning(scheduler: Any, words: tuple[str, ...]) -> None:
    (warning,) = fit_to_the_end(scheduler)
    assert_facts(warning, *words)


@pytest.mark.parametrize(
    "scheduler",
    [
        partial(CosineAnnealingLR, T_max=6),
        partial(CosineAnnealingWarmRestarts, T_0=2),
        partial(PolynomialLR, total_iters=6),
        partial(LinearLR, total_iters=2),
        partial(ConstantLR, total_iters=2),
        partial(OneCycleLR, max_lr=0.1, total_steps=7),
        partial(LambdaLR, lr_lambda=lambda step: 1.0),
    ],
)
def test_a_scheduler_as_long_as_the_run_or_without_a_length_is_not(scheduler: Any) -> None:
    assert fit_to_the_end(scheduler) == ()


def test_a_one_cycle_beyond_its_length_raises_by_itself() -> None:
    with pytest.raises(ValueError, match="Tried to step 6"):
        fit_to_the_end(partial(OneCycleLR, max_lr=0.1, total_steps=5))


def test_a_scheduler_that_was_never_stepped_is_a_warning() -> None:
    (warning,) = fit_to_the_end(partial(StepLR, step_size=1), "epoch", steps=2)
    assert_facts(warning, "StepLR", "never stepped", "2 steps")
    assert "LearningRate('epoch') steps it after" in warning


def test_of_several_schedulers_the_one_that_was_never_stepped_is_named() -> None:
    class OneSided(Task):
        def __init__(self) -> None:
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Any) -> Losses:
            yield "first", nn.functional.cross_entropy(self.first(batch[0]), batch[1])

    of_optimizer, warning = fit_to_the_end(
        {"first": partial(StepLR, step_size=1), "second": partial(StepLR, step_size=1)},
        task=OneSided(),
        optimizer={"first": kit.sgd(), "second": kit.sgd()},
    )
    assert_facts(of_optimizer, "optimizer 'second'", "never stepped")
    assert_facts(warning, "StepLR of 'second'", "never stepped", "6 steps")


def test_a_scheduler_of_a_plateau_that_was_never_measured_is_a_warning() -> None:
    warnings = kit.fit(
        LearningRate("plateau", monitor="train/loss"), LogSchedule(Every(steps=9)), scheduler=partial(ReduceLROnPlateau)
    ).warnings
    assert_each(
        [each.split(":")[0] for each in warnings],
        ["LearningRate never acted"],
        ("ReduceLROnPlateau", "never stepped", "2 steps"),
    )
