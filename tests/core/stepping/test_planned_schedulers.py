"""Schedulers that are made for the planned number of steps: functions of it, warm-ups, and runs of another length."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from math import cos, pi
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    EpochEnd,
    GradientAccumulation,
    Lane,
    LearningRate,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    StepEnd,
    Trainer,
    warmup_cosine,
    warmup_linear,
)
from heliograph.tests.kit import class_batches, fit, linear_classifier, sgd
from heliograph.tests.messages import assert_each, assert_facts, has_facts
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

Scheduler = Callable[..., Any]


def train(scheduler: Any, *plugins: Any, batches: int = 5, **options: Any) -> tuple[list[float], RunResult]:
    """Return the learning rate of each step, and the result."""
    trainer = Trainer([LearningRate("step"), *plugins], device="cpu")
    rates: list[float] = []
    trainer.bus.on(StepEnd, lambda run, event: rates.append(run.optimizer.param_groups[0]["lr"]), lane=Lane.TRANSFORM)
    return rates, fit(trainer, train=class_batches(batches), scheduler=scheduler, **options)


# Functions of the optimizer and the number of steps.


class Factory:
    """An object that is called."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        self.steps.append(steps)
        return CosineAnnealingLR(optimizer, steps)

    def make(self, optimizer: torch.optim.Optimizer, total: int, /) -> LRScheduler:
        return self(optimizer, total)


def with_rate(rate: float, optimizer: torch.optim.Optimizer, steps: int, power: int = 2) -> LRScheduler:
    return OneCycleLR(optimizer, rate, total_steps=steps)


FACTORY = Factory()


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer, steps: OneCycleLR(optimizer, 0.1, total_steps=steps),
        partial(with_rate, 0.1),
        partial(with_rate, 0.1, power=3),
        FACTORY,
        FACTORY.make,
        lambda optimizer, steps, **more: CosineAnnealingLR(optimizer, steps),
    ],
    ids=["lambda", "partial", "partial with a default", "object", "method", "more by keyword"],
)
def test_a_function_of_two_arguments_gets_the_planned_steps(scheduler: Any) -> None:
    seen: list[dict[str, int]] = []
    trainer = Trainer([LearningRate("step"), GradientAccumulation(2)], device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(dict(run.length.scheduler_steps)))
    result = fit(trainer, train=class_batches(5), epochs=2, scheduler=scheduler)
    assert result.progress.steps == 6
    assert seen[0] == {"optimizer": 6}
    assert result.warnings == ()


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.5),
        lambda optimizer, factor=0.5: LambdaLR(optimizer, lambda step: factor),
        partial(LambdaLR, lr_lambda=lambda step: 0.5),
        lambda *optimizers: LambdaLR(optimizers[0], lambda step: 0.5),
    ],
    ids=["one", "a default", "partial of a class", "any number"],
)
def test_a_function_of_one_argument_is_called_with_the_optimizer_alone(scheduler: Any) -> None:
    rates, result = train(scheduler, epochs=1)
    assert rates == [0.05] * 5
    assert result.warnings == ()


def test_a_length_that_nobody_knows_is_refused() -> None:
    def batches() -> Iterator[Any]:
        yield from class_batches(3)

    with pytest.raises(ValueError, match=r"\(optimizer, steps\)"):
        Trainer([LearningRate("step")], device="cpu").fit(
            linear_classifier(), batches(), optimizer=sgd(), scheduler=warmup_cosine(0.1), epochs=1
        )


def test_with_steps_no_loader_needs_a_length() -> None:
    result = Trainer([LearningRate("step")], device="cpu").fit(
        linear_classifier(), iter(class_batches(4)), optimizer=sgd(), scheduler=warmup_linear(1), steps=4
    )
    assert result.warnings == ()


def test_what_the_function_returns_is_checked() -> None:
    with pytest.raises(TypeError, match="scheduler= takes a scheduler,"):
        train(lambda optimizer, steps: steps, epochs=1)


def test_of_several_optimizers_rounds_are_counted() -> None:
    class Two(h.Task):
        def __init__(self) -> None:
            self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

        def training_step(self, run: Run, batch: Any) -> Iterator[tuple[str, Tensor]]:
            yield "one", self.one(batch[0]).square().mean()
            if run.progress.batches % 2:
                yield "other", self.other(batch[0]).square().mean()

    other = Factory()
    result = Trainer([LearningRate("step")], device="cpu").fit(
        Two(),
        class_batches(4),
        optimizer={"one": sgd(), "other": sgd()},
        scheduler={
            "one": warmup_linear(2),
            "other": other,
        },
        epochs=2,
    )
    assert other.steps == [8]
    assert len(result.warnings) == 1
    assert_facts(result.warnings[0], "CosineAnnealingLR of 'other'", "8 planned steps")
    assert "was stepped 4 times" in result.warnings[0]


# Warm-ups.


def test_the_rate_rises_to_the_optimizers_own_and_falls_to_exactly_zero_after_the_last_step() -> None:
    ends: list[float] = []
    rates, result = train(warmup_cosine(3), After(ends), epochs=2)
    rise, fall = [0.1 * (done + 1) / 4 for done in range(3)], [0.1 * (1 + cos(pi * done / 7)) / 2 for done in range(7)]
    assert rates == rise + fall
    assert rates[3] == 0.1
    assert ends == [0.0]
    assert result.warnings == ()


def test_a_line_and_an_end_above_zero() -> None:
    ends: list[float] = []
    rates, _ = train(warmup_linear(0, end=0.3), After(ends), epochs=1)
    assert rates == pytest.approx([0.1, 0.086, 0.072, 0.058, 0.044])
    assert ends == [0.1 * 0.3]


def test_a_fraction_is_rounded_up_to_a_step() -> None:
    assert train(warmup_linear(0.25), epochs=2)[0].index(0.1) == 3
    assert train(warmup_linear(0.2), epochs=2)[0].index(0.1) == 2
    assert train(warmup_linear(0.03), steps=1)[0] == [0.1]


class After(h.Plugin):
    """Notes the rate after the training."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = rates

    @h.on(h.TrainEnd)
    def note(self, run: Run, event: h.TrainEnd) -> None:
        self.rates.append(run.optimizer.param_groups[0]["lr"])


def test_every_group_keeps_its_own_rate_and_a_tensor_its_place() -> None:
    task = linear_classifier()
    weight, bias = task.model.parameters()
    rate = torch.tensor(0.2)
    groups: Any = [{"params": [weight]}, {"params": [bias], "lr": rate}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = warmup_linear(1)(optimizer, 4)
    rates = []
    for _ in range(4):
        optimizer.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        scheduler.step()
    assert rates == [pytest.approx([0.1 * part, 0.2 * part]) for part in (0.5, 1.0, 2 / 3, 1 / 3)]
    assert optimizer.param_groups[1]["lr"] is rate


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: warmup_cosine(-1), "warm-up must.*at least 0.*fraction"),
        (lambda: warmup_cosine(True), "warm-up must.*whole number"),
        (
            lambda: warmup_cosine(1.0),
            "warm-up as a fraction.*less",
        ),
        (lambda: warmup_linear(0.1, end=1.5), "end=.*most 1; got 1.5"),
        (lambda: train(warmup_linear(5), epochs=1), "warm-up of 5.*of 5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("per", ["epoch", "plateau"])
def test_it_is_refused_to_step_a_warm_up_per_epoch(per: Any) -> None:
    plugin = LearningRate(per, monitor="train/loss" if per == "plateau" else None)
    more = [h.LogSchedule(epochs=1)] if per == "plateau" else []
    with pytest.raises(ValueError, match=rf"^LearningRate\('{per}'\) does not fit"):
        fit(plugin, *more, scheduler=warmup_cosine(1), epochs=1)


def test_its_maker_can_be_sent_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(warmup_cosine(0.1))) == warmup_cosine(0.1)


def test_the_plan_says_for_how_many_steps_it_is_made() -> None:
    plan = Trainer([LearningRate("step")], device="cpu").plan(
        linear_classifier(), class_batches(5), optimizer=sgd(), scheduler=warmup_cosine(0.2), epochs=2
    )
    assert "learning_rate: steps WarmupCosine" in plan


# A run that does not make the planned steps.


def test_an_epoch_that_ends_early_is_said_where_a_scheduler_was_made_for_it() -> None:
    class Ends(h.Plugin):
        @h.on(BatchEnd)
        def end(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == 3:
                run.control.end_epoch("the third batch")

    _, result = train(warmup_cosine(1), Ends(), epochs=2)
    (warning,) = result.warnings
    assert_facts(warning, "WarmupCosine", "10 planned steps")
    assert "stepped 8 times" in warning


def test_a_stop_and_skipped_steps_are_not() -> None:
    class Skips(h.Plugin):
        asks = ("skip_step", "skip_batch", "stop")

        def __init__(self, *, stops: bool) -> None:
            self.stops = stops

        @h.on(h.BatchStart)
        def skip_batch(self, run: Run, event: h.BatchStart) -> None:
            if run.progress.batches == 2:
                run.control.skip_batch("one")

        @h.on(h.GradientsReady)
        def skip(self, run: Run, event: h.GradientsReady) -> None:
            if run.progress.batches == 5:
                run.control.skip_step("one")

        @h.on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            if self.stops and run.progress.batches == 7:
                run.control.stop("enough")

    for stops in (False, True):
        assert train(warmup_cosine(1), Skips(stops=stops), epochs=2)[1].warnings == ()


# Resumed runs.


def attempt(folder: Path, scheduler: Any, epochs: float) -> tuple[list[float], list[list[float]], RunResult]:
    """Return the rates, the weights in the end, and the result of one attempt of a training of 5 batches an epoch."""
    task = linear_classifier()
    plugins = [RNGCapture(), SaveSchedule(epochs=100), Checkpoint(folder, resume="auto")]  # the end is saved
    rates, result = train(scheduler, *plugins, task=task, epochs=epochs)
    return rates, [each.flatten().tolist() for each in task.model.parameters()], result


@pytest.mark.parametrize("scheduler", [warmup_cosine(0.3), warmup_linear(4, end=0.1)], ids=["cosine", "linear"])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path, scheduler: Any) -> None:
    class StopAt(h.Plugin):
        asks = ("stop",)

        def __init__(self, batch: int) -> None:
            self.batch = batch

        @h.on(BatchEnd)
        def stop(self, run: Run, event: BatchEnd) -> None:
            if run.progress.batches == self.batch:
                run.control.stop("to be continued")

    def attempts(name: str, *stops: int) -> tuple[list[float], list[list[float]]]:
        rates: list[float] = []
        for stop in (*stops, 1000):
            task = linear_classifier()
            plugins = [RNGCapture(), SaveSchedule(epochs=100), Checkpoint(tmp_path / name, resume="auto"), StopAt(stop)]
            rates += train(scheduler, *plugins, task=task, epochs=2.5)[0]
        return rates, [each.flatten().tolist() for each in task.model.parameters()]

    assert attempts("parts", 2, 3, 9) == attempts("whole")


def test_a_longer_run_takes_the_rate_of_its_own_length_and_says_so(tmp_path: Path) -> None:
    short, _, _ = attempt(tmp_path, warmup_cosine(0.2), 2)
    rest, _, result = attempt(tmp_path, warmup_cosine(0.2), 4)
    whole, _ = train(warmup_cosine(0.2), epochs=4)

    assert rest == whole[10:]
    assert short[-1] < rest[0]
    facts = ("WarmupCosine", "10 steps", "20")
    assert any(has_facts(line, *facts, "step 10") for line in result.notes)
    assert result.resume is not None
    assert_each(result.resume.reasons, facts)
    assert result.warnings == ()


def test_the_same_length_once_more_leaves_nothing_to_do(tmp_path: Path) -> None:
    attempt(tmp_path, warmup_cosine(0.2), 2)
    rates, _, result = attempt(tmp_path, warmup_cosine(0.2), 2)
    assert rates == []
    assert result.resume is not None
    assert result.resume.reasons == ()


def test_a_shorter_length_than_what_is_done_leaves_nothing_to_do_and_the_result_says_why(tmp_path: Path) -> None:
    attempt(tmp_path, warmup_cosine(0.2), 3)
    for asked, length in (("epochs=1", {"epochs": 1}), ("epochs=2.5", {"epochs": 2.5}), ("steps=7", {"steps": 7})):
        plugins = [RNGCapture(), SaveSchedule(epochs=100), Checkpoint(tmp_path, resume="auto")]
        rates, result = train(warmup_cosine(0.2), *plugins, **length)
        assert rates == []
        assert_each(
            result.warnings,
            ("Nothing to train", asked, "epoch 3", "batch 0", "step 15", "epochs=", "steps=", "resume=None"),
        )


def test_another_scheduler_keeps_its_length_and_the_result_warns(tmp_path: Path) -> None:
    def scheduler(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, steps)

    attempt(tmp_path, scheduler, 2)
    _, _, result = attempt(tmp_path, scheduler, 4)
    assert_facts(result.warnings[0], "CosineAnnealingLR", "10 steps", "20")
    assert "handler of CheckpointLoaded" in result.warnings[0]


def on_ranks(folder: Path) -> tuple[list[float], list[float]]:
    def attempts(name: str, *lengths: float) -> list[float]:
        rates: list[float] = []
        for epochs in lengths:
            plugins = [RNGCapture(), SaveSchedule(epochs=100), Checkpoint(folder / name, resume="auto")]
            trainer = Trainer([LearningRate("step"), *plugins], engine="ddp", device="cpu")
            if epochs != lengths[-1]:
                trainer.bus.on(EpochEnd, lambda run, event: run.control.stop("to be continued"))
            trainer.bus.on(
                StepEnd, lambda run, event: rates.append(run.optimizer.param_groups[0]["lr"]), lane=Lane.TRANSFORM
            )
            fit(trainer, train=class_batches(6), scheduler=warmup_cosine(0.25), epochs=2.5)
        return rates

    return attempts("whole", 1), attempts("parts", 2, 1)


def test_on_two_ranks_a_step_is_of_both(ranks: Pool, tmp_path: Path) -> None:
    expected = train(warmup_cosine(0.25), batches=3, epochs=2.5)[0]
    for whole, parts in ranks(2).run(on_ranks, tmp_path):
        assert whole == parts == expected
