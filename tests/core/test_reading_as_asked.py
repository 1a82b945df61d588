"""A loop of one's own reads no batch before it is asked for, so that the model may make its data."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from heliograph import (
    DDPEngine,
    Every,
    GradientAccumulation,
    RNGCapture,
    Run,
    SavePoint,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainStart,
)
from heliograph.tests.kit import Batch, class_batches, fit, go_through, linear_classifier, sgd


class Unsized:
    """Batches without a length."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


class Stateful(Unsized):
    """Such that keep their own position."""

    place = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Made:
    """Batches that are made by the model: each holds the weight that it had then."""

    def __init__(self, task: Supervised, length: int = 4) -> None:
        self.task, self.length = task, length

    def __iter__(self) -> Iterator[tuple[float, Batch]]:
        for _ in range(self.length):
            yield weight_of(self.task), class_batches(1)[0]


def weight_of(task: Supervised) -> float:
    return task.model.get_parameter("weight")[0, 0].item()


def ages(trainer: Trainer, epochs: int = 2) -> tuple[list[bool], int]:
    """Return for each batch whether the weights that it was made with were those that are trained with it."""
    task, fresh = linear_classifier(), list[bool]()
    with trainer.run(task, Made(task), optimizer=sgd(), epochs=epochs) as run:
        for _ in run.epochs():
            for weight, batch in run.batches():
                fresh.append(weight == weight_of(task))
                run.step(task.training_step(run, batch))
    return fresh, run.result.progress.steps


def test_each_batch_is_made_with_the_weights_that_are_trained() -> None:
    assert ages(Trainer(device="cpu")) == ([True] * 8, 8)


def ages_on_ranks() -> tuple[list[bool], int]:
    return ages(Trainer(engine=DDPEngine(device="cpu")))


def test_on_several_ranks_too(ranks: Any) -> None:
    assert ranks(2).run(ages_on_ranks) == [([True] * 8, 8)] * 2


def unequal() -> tuple[int, tuple[str, ...]]:
    task, trainer = linear_classifier(), Trainer(engine=DDPEngine(device="cpu"))
    data = Unsized(class_batches(3 + trainer.engine.rank))
    run = go_through(trainer.run(task, data, optimizer=sgd(), epochs=1))
    return run.result.progress.steps, run.result.notes


def test_the_shortest_rank_ends_the_epoch_and_that_is_noted(ranks: Any) -> None:
    for steps, notes in ranks(2).run(unequal):
        assert steps == 3
        assert any("different numbers of batches:" in line for line in notes)


def weights(train: Any, *plugins: Any, saved: Any = None, states: list[Any] | None = None) -> list[float]:
    task, trainer = linear_classifier(), Trainer([RNGCapture(), *plugins], device="cpu")

    def save(run: Run, event: SavePoint) -> None:
        if states is not None:
            states.append(deepcopy(run.state_dict()))

    trainer.bus.on(SavePoint, save)
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(saved))
    run = go_through(trainer.run(task, train, optimizer=sgd(), epochs=2))
    assert run.result.progress.batches == 10
    return [each for part in task.model.state_dict().values() for each in part.flatten().tolist()]


@pytest.mark.parametrize("kind", [Unsized, Stateful])
def test_the_last_window_of_an_epoch_has_its_true_weight(kind: Any) -> None:
    sized = weights(class_batches(5), GradientAccumulation(2))
    assert weights(kind(class_batches(5)), GradientAccumulation(2)) == pytest.approx(sized, rel=1e-6)


@pytest.mark.parametrize("kind", [Unsized, Stateful])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_resumed_after_any_step_equals_one_that_was_never_interrupted(kind: Any, accumulated: int) -> None:
    def plugins() -> list[Any]:
        return [GradientAccumulation(accumulated), SaveSchedule(Every(steps=1), at_end=False)]

    states: list[Any] = []
    whole = weights(kind(class_batches(5)), *plugins(), states=states)
    assert len(states) == 10 // accumulated + (accumulated == 2)
    for saved in states:
        assert weights(kind(class_batches(5)), *plugins(), saved=saved) == whole


def test_fit_reads_one_batch_ahead_to_know_the_last() -> None:
    task = linear_classifier()
    made, seen = Made(task), list[bool]()

    class Fitted(Supervised):
        def training_step(self, run: Run, batch: Any) -> torch.Tensor:
            seen.append(batch[0] == weight_of(task))
            return super().training_step(run, batch[1])

    fit(task=Fitted(task.model, task.loss_fn), train=made)
    assert seen == [True, False, False, False]
