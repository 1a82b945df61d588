"""A run within another leaves the random draws of the outer one as they were."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    BatchEnd,
    DataModule,
    EpochEnd,
    Event,
    Plugin,
    RNGCapture,
    Run,
    Supervised,
    Trainer,
    TrainStart,
    on,
)
from heliograph.tests.kit import Losses, class_batches, fit, kept_generators, linear_classifier, make_run, sgd
from torch import nn

TASKS = [linear_classifier() for _ in range(60)]  # made outside of any run, as making them draws


class Drawing(DataModule):
    """Draws as it is set up."""

    def set_up(self) -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def train(self) -> Any:
        return class_batches(2)

    def test(self) -> Any:
        return class_batches(2)


def train_another() -> None:
    fit(RNGCapture(3), task=TASKS.pop())


def train_another_by_hand() -> None:
    with Trainer([RNGCapture(3)], device="cpu").run(TASKS.pop(), class_batches(2), optimizer=sgd(), epochs=1) as run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(run.stepping.forward(run, batch))


def train_on_what_draws() -> None:
    fit(task=TASKS.pop(), train=Drawing())


def evaluate_another() -> None:
    Trainer(device="cpu").test(TASKS.pop(), Drawing())


class Within(Plugin):
    """Does something in a handler."""

    def __init__(self, event: type[Event], action: Callable[[], None]) -> None:
        self._event, self._action = event, action

    @on(TrainStart, BatchEnd, EpochEnd)
    def act(self, run: Run, event: Event) -> None:
        if isinstance(event, self._event):
            self._action()


def losses(*plugins: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    kept = Losses()
    fit(RNGCapture(), kept, *plugins, task=Supervised(model, nn.functional.cross_entropy), epochs=3)
    return kept.values


@pytest.mark.parametrize("event", [TrainStart, BatchEnd, EpochEnd])
@pytest.mark.parametrize("action", [train_another, train_on_what_draws, evaluate_another])
def test_a_run_in_a_handler_leaves_the_draws_of_the_outer_one(event: type[Event], action: Callable[[], None]) -> None:
    with kept_generators():
        assert losses(Within(event, action)) == losses()


@pytest.mark.parametrize("action", [train_another, train_another_by_hand, evaluate_another])
def test_so_does_one_within_a_loop_of_ones_own(action: Callable[[], None]) -> None:
    def draws(act: Callable[[], None]) -> list[float]:
        drawn = []
        with make_run(Trainer([RNGCapture()], device="cpu")) as run:
            for _ in run.epochs():
                for batch in run.batches():
                    run.step(run.stepping.forward(run, batch))
                    act()
                    drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
        return drawn

    with kept_generators():
        assert draws(action) == draws(lambda: None)


def test_one_that_fails_leaves_them_too() -> None:
    def fail() -> None:
        with pytest.raises(ValueError, match="is empty"):
            fit(task=TASKS.pop(), train=[])

    with kept_generators():
        assert losses(Within(EpochEnd, fail)) == losses()


def test_runs_one_after_the_other_draw_on() -> None:
    with kept_generators():
        fit(RNGCapture(3))
        after = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(3))


def test_a_run_in_another_thread_is_not_within_this_one() -> None:
    states: list[torch.Tensor] = []

    def train() -> None:
        fit(RNGCapture(3), task=TASKS.pop())
        states.append(torch.get_rng_state())

    def act() -> None:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        states.append(torch.get_rng_state())

    with kept_generators():
        trainer = Trainer([Within(EpochEnd, act)], device="cpu")
        trainer.fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=1)
    assert torch.equal(*states)
