"""What a handler finds at each event: the counters, the learning rate, the gradients, the logged loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    BatchStart,
    EpochEnd,
    EpochStart,
    Event,
    Every,
    GradientAccumulation,
    GradientClipping,
    GradientsReady,
    Lane,
    LearningRate,
    Log,
    LogSchedule,
    Plugin,
    Run,
    StepEnd,
    Trainer,
    ValidationEnd,
    ValidationSchedule,
    ValidationStart,
    on,
)
from heliograph.tests.kit import EventRecorder, class_batches, fit, linear_classifier, sgd
from torch.nn.utils import get_total_norm

Row = tuple[str, int, int, int, int, int]
WATCHED: list[type[Event]] = [EpochStart, BatchStart, StepEnd, BatchEnd, ValidationStart, ValidationEnd, EpochEnd]


class Counters(Plugin):
    """Keeps (event, epochs, batch of the epoch, batches, steps, validations) at each event."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @on(*WATCHED)
    def keep(self, run: Run, event: Event) -> None:
        at = run.progress
        self.rows.append((event.name, at.epoch, at.batch, at.batches, at.steps, at.validations))


@pytest.mark.parametrize("length", [{"epochs": 2}, {"epochs": None, "steps": 4}])
def test_counters_count_alike_in_runs_by_epochs_and_by_steps(length: dict[str, Any]) -> None:
    """Two epochs of three batches, of which two are a window; each epoch is validated."""
    counters = Counters()
    plugins = [GradientAccumulation(2), ValidationSchedule(Every(epochs=1)), counters]
    fit(*plugins, train=class_batches(3), validation=class_batches(1), **length)

    assert counters.rows == [
        ("epoch_start", 0, 0, 0, 0, 0),
        ("batch_start", 0, 0, 0, 0, 0),
        ("batch_end", 0, 1, 1, 0, 0),
        ("batch_start", 0, 1, 1, 0, 0),
        ("step_end", 0, 1, 1, 1, 0),
        ("batch_end", 0, 2, 2, 1, 0),
        ("batch_start", 0, 2, 2, 1, 0),
        ("step_end", 0, 2, 2, 2, 0),
        ("batch_end", 0, 3, 3, 2, 0),
        ("epoch_end", 1, 0, 3, 2, 0),
        ("validation_start", 1, 0, 3, 2, 0),
        ("validation_end", 1, 0, 3, 2, 0),  # it is counted when its handlers are done
        ("epoch_start", 1, 0, 3, 2, 1),
        ("batch_start", 1, 0, 3, 2, 1),
        ("batch_end", 1, 1, 4, 2, 1),
        ("batch_start", 1, 1, 4, 2, 1),
        ("step_end", 1, 1, 4, 3, 1),
        ("batch_end", 1, 2, 5, 3, 1),
        ("batch_start", 1, 2, 5, 3, 1),
        ("step_end", 1, 2, 5, 4, 1),
        ("batch_end", 1, 3, 6, 4, 1),
        ("epoch_end", 2, 0, 6, 4, 1),
        ("validation_start", 2, 0, 6, 4, 1),
        ("validation_end", 2, 0, 6, 4, 1),
    ]


def test_a_step_end_comes_before_the_scheduler_in_early_lanes_and_after_it_in_late_ones() -> None:
    rates: list[tuple[float, float]] = []
    before = [0.0]
    trainer = Trainer([LearningRate("step")], device="cpu")

    def note(run: Run, event: StepEnd) -> None:
        before[0] = run.optimizer.param_groups[0]["lr"]
        assert run.optimizer.param_groups[0]["params"][0].grad is not None

    trainer.bus.on(StepEnd, note, lane=Lane.MEASURE)
    trainer.bus.on(
        StepEnd, lambda run, event: rates.append((before[0], run.optimizer.param_groups[0]["lr"])), lane=Lane.REPORT
    )
    halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    fit(trainer, optimizer=sgd(1.0), scheduler=halved)

    assert rates == [(1.0, 0.5), (0.5, 0.25)]


def test_gradients_are_clipped_between_the_early_lanes_and_the_late_ones() -> None:
    norms: dict[str, list[float]] = {"TRANSFORM": [], "PERSIST": []}
    trainer = Trainer([GradientClipping(norm=0.01)], device="cpu")

    def note(lane: Lane) -> None:
        def keep(run: Run, event: GradientsReady) -> None:
            gradients = [each.grad for each in run.modules["model"].parameters() if each.grad is not None]
            norms[lane.name].append(get_total_norm(gradients).item())

        trainer.bus.on(GradientsReady, keep, lane=lane)

    note(Lane.TRANSFORM)
    note(Lane.PERSIST)
    fit(trainer)

    assert all(norm > 0.1 for norm in norms["TRANSFORM"])
    assert norms["PERSIST"] == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_loss_that_is_no_number_is_logged_as_it_is() -> None:
    inputs, targets = class_batches(1)[0]
    logged: list[float] = []
    trainer = Trainer([LogSchedule(Every(steps=2))], device="cpu")
    trainer.bus.on(Log, lambda run, event: logged.append(event.metrics["train/loss"]))
    task = linear_classifier()
    fit(trainer, task=task, train=[(inputs, targets), (inputs * math.nan, targets)])

    assert len(logged) == 1
    assert math.isnan(logged[0])


def test_a_test_has_events_of_its_own() -> None:
    trainer = Trainer(device="cpu")
    trace = EventRecorder(trainer.bus).trace
    trainer.test(linear_classifier(), {"day": class_batches(1), "night": class_batches(1)})

    pair = ["test_batch_start", "test_batch_end"]
    assert trace == ["test_start", *pair, *pair, "test_end", "run_closed"]
