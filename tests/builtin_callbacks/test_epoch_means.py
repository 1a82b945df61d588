"""EpochMeans: beside the means since the last log, those of the whole epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
from heliograph.tests.kit import class_batches, linear_classifier, sgd


class Batches(h.Plugin):
    """Keeps the loss of every batch, and what is logged."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    @h.on(h.BatchEnd)
    def keep(self, run: h.Run, event: h.BatchEnd) -> None:
        self.losses.append((run.progress.epoch, float(run.loss.detach())))

    @h.on(h.Log, lane=h.Lane.REPORT)
    def keep_log(self, run: h.Run, event: h.Log) -> None:
        self.logged.append((run.progress.steps, dict(event.metrics)))


def uneven() -> list[Any]:
    return [*class_batches(4), *class_batches(1, size=1)]


def test_the_mean_of_all_samples_of_each_epoch_at_its_end() -> None:
    seen = Batches()
    trainer = h.Trainer([h.EpochMeans(), h.LogSchedule(h.Every(steps=2)), seen], device="cpu")
    trainer.fit(linear_classifier(metrics={"accuracy": h.accuracy}), uneven(), optimizer=sgd(), epochs=2)

    assert [(step, sorted(metrics)) for step, metrics in seen.logged] == [
        (2, ["train/accuracy", "train/loss"]),
        (4, ["train/accuracy", "train/loss"]),
        (5, ["train/accuracy", "train/epoch/accuracy", "train/epoch/loss", "train/loss"]),
        (6, ["train/accuracy", "train/loss"]),
        (8, ["train/accuracy", "train/loss"]),
        (10, ["train/accuracy", "train/loss"]),
        (10, ["train/epoch/accuracy", "train/epoch/loss"]),
    ]
    sizes = [3, 3, 3, 3, 1]
    for epoch, (_, metrics) in enumerate([seen.logged[2], seen.logged[6]]):
        losses = [loss for at, loss in seen.losses if at == epoch]
        mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        assert metrics["train/epoch/loss"] == pytest.approx(mean, rel=1e-6)


def test_an_epoch_of_which_it_saw_a_part_has_no_mean() -> None:
    seen = Batches()
    means = h.EpochMeans().when(h.Between(steps=(3, 99)))
    trainer = h.Trainer([means, h.LogSchedule(h.Every(steps=2)), seen], device="cpu")
    trainer.fit(linear_classifier(), class_batches(4), optimizer=sgd(), epochs=2)
    assert [step for step, metrics in seen.logged if "train/epoch/loss" in metrics] == [8]
    losses = [loss for epoch, loss in seen.losses if epoch == 1]
    assert seen.logged[-1][1]["train/epoch/loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_early_stopping_may_watch_it() -> None:
    trainer = h.Trainer(
        [h.EpochMeans(), h.EarlyStopping("train/epoch/loss", patience=1, min_delta=100.0)], device="cpu"
    )
    result = trainer.fit(linear_classifier(), class_batches(2), optimizer=sgd(), epochs=9)
    assert (result.status, result.progress.epoch) == ("stopped", 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("cut", range(1, 10))
def test_a_resumed_run_logs_the_same_means(tmp_path: Path, cut: int) -> None:
    def train(stop: int | None, folder: Path) -> Batches:
        seen = Batches()
        plugins: list[Any] = [h.RNGCapture(), h.EpochMeans(), h.LogSchedule(h.Every(steps=2)), seen]
        plugins += [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(folder, resume="auto")]
        trainer = h.Trainer(plugins, device="cpu")
        if stop is not None:
            trainer.bus.on(h.BatchEnd, stop_at(stop))
        trainer.fit(linear_classifier(), uneven(), optimizer=sgd(), epochs=2)
        return seen

    def stop_at(step: int) -> Callable[..., None]:
        return lambda run, event: run.control.stop("enough") if run.progress.steps == step else None

    whole = train(None, tmp_path / "whole")
    first, second = train(cut, tmp_path / "cut"), train(None, tmp_path / "cut")
    both = {step: {} for step, _ in [*first.logged, *second.logged]}  # type: dict[int, dict[str, float]]
    for step, metrics in [*first.logged, *second.logged]:
        both[step] |= metrics
    expected = {step: {} for step, _ in whole.logged}  # type: dict[int, dict[str, float]]
    for step, metrics in whole.logged:
        expected[step] |= metrics
    assert both == expected


def test_a_log_says_what_its_means_are_of() -> None:
    weights: list[dict[str, float]] = []
    trainer = h.Trainer([h.LogSchedule(h.Every(epochs=1))], device="cpu")
    trainer.bus.on(h.Log, lambda run, event: weights.append(dict(event.weights)))
    trainer.fit(linear_classifier(), uneven(), optimizer=sgd(), epochs=1)
    assert weights == [{"train/loss": 13}]
