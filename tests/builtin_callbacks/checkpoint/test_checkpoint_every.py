"""`Checkpoint(every=...)` asks for saves by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from heliograph import (
    At,
    BatchEnd,
    Checkpoint,
    EpochEnd,
    Every,
    Plugin,
    RNGCapture,
    Run,
    SavePoint,
    SaveSchedule,
    Trainer,
    on,
)
from heliograph.tests.kit import Losses, checkpoint_names, class_batches, fit, linear_classifier, sgd
from heliograph.tests.ranks_pool import Pool


def saves(*plugins: Any, **options: Any) -> list[tuple[int, int]]:
    """Return (epoch, step) at each save of a run of 5 batches an epoch."""
    trainer, places = Trainer(plugins, device="cpu"), list[tuple[int, int]]()
    trainer.bus.on(SavePoint, lambda run, event: places.append((run.progress.epoch, run.progress.steps)))
    result = fit(trainer, train=class_batches(5), **({"epochs": 2} | options))
    assert result.warnings == ()
    return places


@pytest.mark.parametrize(
    ("every", "places"),
    [
        (Every(epochs=1), [(1, 5), (2, 10)]),
        (Every(steps=4), [(0, 4), (1, 8), (2, 10)]),  # and at the end
        (Every(steps=5), [(0, 5), (1, 10), (2, 10)]),  # after the end of the last epoch the state is another
        (At(fraction=[0.5, 0.7]), [(0, 5), (1, 7), (2, 10)]),
        (Every(steps=100), [(2, 10)]),
    ],
)
def test_it_asks_by_itself_and_at_the_end(tmp_path: Path, every: Any, places: list[tuple[int, int]]) -> None:
    checkpoint = Checkpoint(tmp_path, every=every, keep_last=None)
    assert saves(checkpoint) == places
    assert len(checkpoint_names(tmp_path)) == len({step for _, step in places})


@pytest.mark.parametrize("is_first", [True, False])
def test_with_a_schedule_one_boundary_has_one_save(tmp_path: Path, is_first: bool) -> None:
    schedule, checkpoint = SaveSchedule(steps=3, at_start=True), Checkpoint(tmp_path, every=Every(steps=2))
    plugins = [schedule, checkpoint] if is_first else [checkpoint, schedule]
    steps = [step for _, step in saves(*plugins, steps=7, epochs=None)]
    assert steps == [0, 2, 3, 4, 6, 7]


def test_without_it_somebody_else_must_ask(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'checkpoint' would never act:"):
        saves(Checkpoint(tmp_path))


def test_without_it_no_handler_is_called_at_each_batch(tmp_path: Path) -> None:
    trainer = Trainer([SaveSchedule(epochs=1), Checkpoint(tmp_path)], device="cpu")
    owners = [str(each.owner) for each in trainer.bus.signal(BatchEnd).subscriptions.values()]
    assert owners == ["save_schedule"]


@pytest.mark.parametrize(
    ("every", "asked"),
    [
        (Every(steps=4), [1, 4, 8, 10]),
        (Every(epochs=1), [1, 5, 6, 10]),
        (At(fraction=[0.5, 0.7]), [1, 5, 7, 10]),
        (Every(seconds=600), [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]),  # a handler may set the clock
    ],
)
def test_its_filter_is_asked_when_it_is_due(tmp_path: Path, every: Any, asked: list[int]) -> None:
    """And at the first batch and the first end of an epoch; each of both learns by itself what is due next."""
    steps: list[int] = []

    class Noting(Checkpoint):
        @on(BatchEnd, EpochEnd, idle_until="next_due")
        def ask_when_due(self, run: Run, event: BatchEnd | EpochEnd) -> None:
            steps.append(run.progress.steps)
            super().ask_when_due(run, event)

    saves(Noting(tmp_path, every=every))
    assert steps == asked


@pytest.mark.parametrize("every", [100, "epoch", {"epochs": 1}])
def test_it_takes_a_filter(tmp_path: Path, every: Any) -> None:
    with pytest.raises(TypeError, match=r"^Checkpoint\(every=\.\.\.\) takes a filter"):
        Checkpoint(tmp_path, every=every)


def test_the_plan_says_when(tmp_path: Path) -> None:
    plan = Trainer([Checkpoint(tmp_path, every=Every(epochs=1))], device="cpu").plan(
        linear_classifier(), class_batches(5), optimizer=sgd(), epochs=1
    )
    assert "keeps the last 1" in " ".join(plan.split())


def test_the_same_filter_in_two_plugins_counts_twice(tmp_path: Path) -> None:
    every = Every(emissions=4)
    first, second = Checkpoint(tmp_path / "a", every=every), Checkpoint(tmp_path / "b", every=every).named("b")
    assert [step for _, step in saves(first, second)] == [4, 7, 10]


class StopAt(Plugin):
    asks = ("stop",)

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @on(BatchEnd)
    def stop(self, run: Run, event: BatchEnd) -> None:
        if run.progress.batches == self.batch:
            run.control.stop("to be continued")


def attempts(folder: Path, *stops: int, engine: str | None = None) -> tuple[list[float], list[list[int]]]:
    """Return the losses, and the steps at which each attempt was saved."""
    losses, steps = Losses(), []
    for stop in (*stops, 1000):
        checkpoint = Checkpoint(folder, every=Every(steps=3), resume="auto")
        trainer = Trainer([RNGCapture(), checkpoint, losses, StopAt(stop)], engine=engine, device="cpu")
        places: list[int] = []
        trainer.bus.on(SavePoint, lambda run, event, places=places: places.append(run.progress.steps))
        fit(trainer, train=class_batches(10), steps=11)
        steps.append(places)
    return losses.values, steps


def test_a_resumed_run_is_saved_in_the_same_rhythm(tmp_path: Path) -> None:
    losses, steps = attempts(tmp_path / "parts", 4, 7)
    assert steps == [[3, 4], [6, 7], [9, 11]]
    assert losses == attempts(tmp_path / "whole")[0]


def on_ranks(folder: Path) -> tuple[list[float], list[list[int]], list[float]]:
    return *attempts(folder / "parts", 2, 4, engine="ddp"), attempts(folder / "whole", engine="ddp")[0]


@pytest.mark.whole
def test_on_two_ranks_too(ranks: Pool, tmp_path: Path) -> None:
    for losses, steps, whole in ranks(2).run(on_ranks, tmp_path):
        assert steps == [[2], [3, 4], [6, 9, 11]]
        assert losses == whole
