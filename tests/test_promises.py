"""The product's promises, end to end: what a user may rely on, one test each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.tests.kit import Losses, adam, sgd
from heliograph.tests.messages import assert_facts
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def classifier() -> tuple[h.Supervised, list[tuple[Tensor, Tensor]]]:
    """Return a task that can be learnt, and its data."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    batches = list(zip(torch.split(inputs, 8), torch.split(targets, 8), strict=True))
    return h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy}), batches


def losses(*plugins: h.Plugin, validated: bool = False) -> list[float]:
    task, batches = classifier()
    watch = Losses()
    trainer = h.Trainer([h.RNGCapture(), *plugins, watch], device="cpu")
    trainer.fit(task, batches, validation=batches if validated else None, optimizer=adam(), epochs=3)
    return watch.values


def test_a_stranger_learns_something_in_one_call() -> None:
    task, batches = classifier()
    trainer = h.Trainer([h.RNGCapture(), h.ValidationSchedule(h.Every(epochs=1))], device="cpu")
    result = trainer.fit(task, batches, validation=batches, optimizer=adam(), epochs=30)
    assert result.metrics["validation/accuracy"] > 0.95


def test_adding_an_observer_changes_no_loss(tmp_path: Path) -> None:
    class Draw(h.Plugin):
        @h.on(h.ValidationBatchEnd)
        def draw(self, run: h.Run, event: h.ValidationBatchEnd) -> None:
            torch.rand(100)

    schedules = [h.ValidationSchedule(h.Every(steps=3)), h.LogSchedule(h.Every(steps=2))]
    loggers = [h.JsonlLog(tmp_path / "log.jsonl"), h.FileLog(tmp_path), h.TensorBoard(tmp_path), h.HandlerTimes()]
    assert losses() == losses(Draw(), *schedules, *loggers, h.ProgressBar(plain=True), validated=True)


def test_a_decision_says_who_made_it_and_why() -> None:
    task, batches = classifier()
    trainer = h.Trainer(
        [h.ValidationSchedule(h.Every(epochs=1)), h.EarlyStopping("validation/loss", patience=1, min_delta=5.0)]
    )
    result = trainer.fit(task, batches, validation=batches, optimizer=adam(), epochs=50)
    assert (result.status, result.stopped_by) == ("stopped", "early_stopping")
    assert_facts(result.reason, "validation/loss", "not improved")
    assert_facts(str(result.history).splitlines()[-1], "epoch 2", "batch 0", "step 16", "early_stopping: stop")


def test_the_best_checkpoint_holds_the_best_weights(tmp_path: Path) -> None:
    task, batches = classifier()
    seen: dict[float, Tensor] = {}

    class Watch(h.Plugin):
        @h.on(h.ValidationEnd)
        def watch(self, run: h.Run, event: h.ValidationEnd) -> None:
            seen[event.metrics["validation/loss"]] = run.modules["model"][0].weight.detach().clone()

    trainer = h.Trainer(
        [
            h.RNGCapture(),
            Watch(),
            h.ValidationSchedule(h.Every(epochs=1)),
            h.SaveSchedule(h.Every(epochs=1)),
            h.Checkpoint(tmp_path, keep_best=1, monitor="validation/loss"),
            h.CheckpointLabel("loss_{validation/loss:.4f}"),
        ]
    )
    result = trainer.fit(task, batches, validation=batches, optimizer=sgd(3.0), epochs=6)
    assert result.best_checkpoint is not None
    assert f"_loss_{min(seen):.4f}.pth" in result.best_checkpoint.name
    h.load_weights(task, result.best_checkpoint)
    assert torch.equal(task.model[0].weight, seen[min(seen)])  # type: ignore[index]  # it is a Sequential


def test_plugins_are_toggled_while_the_run_continues() -> None:
    task, batches = classifier()
    watch = Losses()
    trainer = h.Trainer([watch], device="cpu")

    def toggle(run: h.Run, event: h.EpochEnd) -> None:
        (trainer.plugins.disable if event.epoch == 0 else trainer.plugins.enable)("losses")

    trainer.bus.on(h.EpochEnd, toggle)
    trainer.fit(task, batches, optimizer=adam(), epochs=3)
    assert len(watch.values) == 16
    with trainer.plugins.disabled("losses"):
        trainer.fit(task, batches, optimizer=adam(), epochs=1)
    assert len(watch.values) == 16
    assert trainer.plugins.is_enabled(Losses)


def test_a_plugin_of_ten_lines_is_enough() -> None:
    class StopAtLoss(h.Plugin):
        asks = ("stop",)

        def __init__(self, target: float) -> None:
            self.target = target

        @h.on(h.Log)
        def look(self, run: h.Run, event: h.Log) -> None:
            if event.metrics["train/loss"] < self.target:
                run.control.stop(f"loss below {self.target}")

    task, batches = classifier()
    trainer = h.Trainer([h.LogSchedule(h.Every(steps=8)), StopAtLoss(0.3)], device="cpu")
    result = trainer.fit(task, batches, optimizer=adam())
    assert (result.status, result.stopped_by) == ("stopped", "stop_at_loss")
    assert result.reason == "loss below 0.3"


def test_an_outage_of_a_logger_does_not_kill_a_run_and_a_lost_checkpoint_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    task, batches = classifier()
    schedules = [h.LogSchedule(h.Every(steps=1)), h.SaveSchedule(h.Every(steps=4))]
    trainer = h.Trainer([*schedules, h.JsonlLog(tmp_path / "file" / "log.jsonl"), h.Checkpoint(tmp_path)], device="cpu")
    result = trainer.fit(task, batches, optimizer=adam(), epochs=1)
    assert result.status == "completed"
    assert len(result.plugin_errors["jsonl_log"]) == 3
    (warning,) = result.warnings
    assert_facts(warning, "'jsonl_log'", "switched off", "3 errors", "log", "step 3", "FileExistsError")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(task, batches, optimizer=adam(), epochs=1)
    assert [path.name for path in tmp_path.glob("*.pth*")] == ["run_epoch_1_iter_8.pth"]


def test_everything_is_closed_on_every_ending(tmp_path: Path) -> None:
    import logging

    from tqdm import tqdm

    task, batches = classifier()
    handlers = list(logging.getLogger("heliograph").handlers)

    def fail(run: h.Run, event: h.StepEnd) -> None:
        raise KeyboardInterrupt

    trainer = h.Trainer(
        [h.ProgressBar(plain=False), h.FileLog(tmp_path), h.TensorBoard(tmp_path / "board")], device="cpu"
    )
    handle = trainer.bus.on(h.StepEnd, fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(task, batches, optimizer=adam(), epochs=1)
    assert logging.getLogger("heliograph").handlers == handlers
    assert not list(getattr(tqdm, "_instances", []))
    handle.remove()
    assert trainer.fit(task, batches, optimizer=adam(), epochs=1).status == "completed"


def test_any_iterable_of_batches_is_a_loader() -> None:
    task, batches = classifier()
    dataset = TensorDataset(torch.cat([each[0] for each in batches]), torch.cat([each[1] for each in batches]))

    class Stream:
        def __iter__(self) -> Any:
            return iter(batches)

    for loader in (batches, tuple(batches), Stream(), DataLoader(dataset, batch_size=8)):
        result = h.Trainer(device="cpu").fit(task, loader, optimizer=adam(), epochs=2)
        assert (result.progress.steps, result.progress.samples) == (16, 128)
