"""What observers draw changes no training; what critical plugins draw does."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Every,
    HandlerTimes,
    Lane,
    LogSchedule,
    Plugin,
    RNGCapture,
    Run,
    SavePoint,
    SaveSchedule,
    StepEnd,
    Trainer,
    TrainStart,
    ValidationSchedule,
    on,
)
from heliograph.events import CATALOGUE
from numpy.random import mtrand

Make = Callable[..., Any]


class Drawing(Plugin):
    """Draws from every generator at every event, and seeds one."""

    def __init__(self) -> None:
        self.received: set[str] = set()

    @on(*CATALOGUE, lane=Lane.REPORT)
    def draw(self, run: Run, event: Any) -> None:
        self.received.add(event.name)
        draws(4)
        np.random.default_rng().random()
        torch.manual_seed(3)


class Observer(Drawing):
    policy = "observer"


class Careless(Observer):
    draws = False


class Foreign:
    """An observer that is not a subclass of Plugin."""

    policy = "observer"

    @on(BatchEnd, lane=Lane.TRANSFORM)
    def draw(self, run: Run, event: BatchEnd) -> None:
        draws(1)


def draws(count: int = 1) -> list[tuple[float, ...]]:
    return [(random.random(), random.gauss(0, 1), float(np.random.randn()), torch.rand(1).item()) for _ in range(count)]


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any, weights: Make) -> Callable[..., Any]:
    """Return a function that trains with plugins, and returns losses, draws and weights."""

    def train(*plugins: Any, saved: Mapping[str, Any] | None = None, cuts: dict[int, Any] | None = None) -> Any:
        schedules = [LogSchedule(Every(steps=2)), ValidationSchedule(Every(steps=3)), SaveSchedule(At(steps=[4]))]
        trainer = Trainer([RNGCapture(7), *schedules, *plugins], device="cpu")
        seen: list[Any] = []
        trainer.bus.on(StepEnd, lambda run, event: seen.append((run.loss.item(), *draws())))
        if cuts is not None:
            trainer.bus.on(SavePoint, lambda run, event: cuts.update({run.progress.steps: deepcopy(run.state_dict())}))
        if saved is not None:
            trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
        mine = task(dropout=0.5)
        trainer.fit(mine, batches(5), optimizer=sgd, epochs=2, validation=batches(2, seed=1))
        return seen, [each.tolist() for each in weights(mine)]

    return train


def test_an_observer_that_draws_at_every_event_changes_nothing(fit: Make) -> None:
    observer = Observer()
    assert fit(observer) == fit()
    assert observer.received >= {
        "train_start",
        "batch_start",
        "log",
        "validation_batch_end",
        "save_point",
        "run_closed",
    }


def test_nor_where_the_run_is_resumed(fit: Make) -> None:
    cuts: dict[int, Any] = {}
    losses, weights = fit(cuts=cuts)
    observer = Observer()
    resumed, same_weights = fit(observer, saved=cuts[4])

    assert resumed == losses[4:]
    assert weights == same_weights
    assert "checkpoint_loaded" in observer.received


def test_nor_one_that_is_no_plugin_of_ours_nor_one_that_comes_late(fit: Make) -> None:
    class Late(Plugin):
        @on(StepEnd)
        def register(self, run: Any, event: StepEnd) -> None:
            if run.progress.steps == 3:
                run.plugins.register(Observer())

    assert fit(Foreign(), Late()) == fit()


def test_an_observer_that_fails_is_no_exception(fit: Make) -> None:
    class Failing(Plugin):
        policy = "observer"

        @on(BatchEnd)
        def fail(self, run: Run, event: BatchEnd) -> None:
            draws(2)
            raise OSError("the dashboard is away")

    assert fit(Failing()) == fit()


def test_a_critical_plugin_draws_from_the_training_s_stream(fit: Make) -> None:
    assert fit(Drawing()) != fit()


def test_one_that_says_that_it_never_draws_is_not_kept_apart(fit: Make) -> None:
    assert fit(Careless()) != fit()


def test_without_rng_capture_nothing_is_kept_apart(task: Make, batches: Make, sgd: Any, losses: Make) -> None:
    seen = []
    for plugins in ([], [Foreign()]):
        torch.manual_seed(1)
        trainer = Trainer(plugins, device="cpu")
        seen.append(losses(trainer))
        trainer.fit(task(dropout=0.5), batches(5), optimizer=sgd, epochs=1)

    assert seen[0][0] == seen[1][0]
    assert seen[0] != seen[1]


def chains(trainer: Trainer) -> list[tuple[Any, ...]]:
    return [signal.chain for signal in trainer.bus.signals()]


@pytest.mark.parametrize(("capture", "wrapped"), [([RNGCapture()], [True, False, False]), ([], [False, False, False])])
def test_the_wrappers_are_on_where_they_must_be_and_off_after_the_run(
    task: Make, batches: Make, sgd: Any, capture: list[Any], wrapped: list[bool]
) -> None:
    plugins = Observer(), Careless(), Drawing()
    trainer = Trainer([*capture, *plugins], device="cpu")
    within: list[Any] = []
    trainer.bus.on(BatchEnd, lambda run, event: within.append(trainer.bus.signal(StepEnd).chain))
    plain = chains(trainer)
    trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)

    assert [link != plugin.draw for link, plugin in zip(within[0], plugins, strict=True)] == wrapped
    assert chains(trainer) == plain


@pytest.mark.parametrize("error", [ArithmeticError(), KeyboardInterrupt()])
def test_the_wrappers_are_off_after_a_failure_too(task: Make, batches: Make, sgd: Any, error: BaseException) -> None:
    def fail(run: Run, event: BatchEnd) -> None:
        raise error

    trainer = Trainer([RNGCapture(), HandlerTimes(), Observer()], device="cpu")
    trainer.bus.on(BatchEnd, fail)
    plain = chains(trainer)
    with pytest.raises(type(error)):
        trainer.fit(task(), batches(1), optimizer=sgd, epochs=1)

    assert chains(trainer) == plain


def test_the_time_of_observers_is_measured_beside(task: Make, batches: Make, sgd: Any, fit: Make) -> None:
    trainer = Trainer([RNGCapture(), HandlerTimes(), Observer(), Drawing()], device="cpu")
    result = trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    assert {"observer", "drawing"} <= result.plugin_seconds.keys()
    assert all(seconds > 0 for seconds in result.plugin_seconds.values())
    assert fit(HandlerTimes(), Observer()) == fit()


def test_the_very_generators_are_put_back(task: Make, batches: Make, sgd: Any) -> None:
    bits = mtrand.get_bit_generator()
    trainer = Trainer([RNGCapture(), Observer()], device="cpu")
    trainer.fit(task(), batches(2), optimizer=sgd, epochs=1)

    assert mtrand.get_bit_generator() is bits
