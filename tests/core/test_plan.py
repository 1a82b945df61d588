"""What a training says that it will do, before it does it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchStart,
    Checkpoint,
    EpochStart,
    Every,
    GradientAccumulation,
    LogSchedule,
    Once,
    Plugin,
    RNGCapture,
    Run,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
    on,
)
from heliograph.tests.kit import class_batches, linear_classifier, sgd
from heliograph.tests.messages import assert_each, assert_facts
from torch import nn
from torch.utils.data import TensorDataset

BATCHES = class_batches(6)
TEN = TensorDataset(torch.randn(10, 4), torch.zeros(10).long())
VALIDATES = ValidationSchedule(Every(epochs=1))


def plan(*plugins: Any, task: Any = None, train: Any = None, **options: Any) -> list[str]:
    """Return the lines of a plan, up to the handlers."""
    options = {"optimizer": sgd()} | options
    text = Trainer(plugins, device="cpu").plan(task or linear_classifier(), train or BATCHES, **options)
    return text.split("\n\n")[0].split("\n")


def test_a_plan_says_model_hardware_and_length() -> None:
    assert plan(epochs=2, name="night") == [
        "run 'night'",
        "  model: Supervised with 10 parameters",
        "  hardware: cpu, fp32, 1 process, DeviceEngine",
        "  length: 2 epochs, 12 steps, 6 batches an epoch, global batch 3",
        "  seed: none, so another run draws other random numbers; RNGCapture() sets one",
    ]


def test_the_seed_is_that_of_a_plugin_or_none() -> None:
    assert_each(plan(RNGCapture(7), epochs=1)[4:], ("rng_capture", "7"))


def test_frozen_parameters_are_counted_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2))
    model[0].requires_grad_(False)
    task = Supervised(model, nn.functional.cross_entropy)
    assert_facts(plan(task=task, epochs=1)[1], "model", "2,102 parameters", "602")


@pytest.mark.parametrize(
    ("plugins", "options", "length"),
    [
        (
            [GradientAccumulation(4)],
            {"epochs": 1},
            "1 epoch, 2 steps, 6 batches an epoch, 4 batches a step, global batch 12",
        ),
        ([], {"steps": 1}, "1 step, 6 batches an epoch, global batch 3"),
        ([], {"epochs": 1, "steps": 4}, "1 epoch, at most 4 steps, 6 batches an epoch, global batch 3"),
        ([], {"train": (each for each in BATCHES), "steps": 4}, "4 steps, an epoch of unknown length"),
        (
            [],
            {"train": TEN, "epochs": 1, "loader_params": {"batch_size": 4}},
            "1 epoch, 3 steps, 3 batches an epoch, global batch 4",
        ),
        (
            [],
            {"train": TEN, "epochs": 1, "loader_params": {"batch_sampler": [[0, 1, 2], [3]]}},
            "1 epoch, 2 steps, 2 batches an epoch seed:",
        ),
    ],
)
def test_the_length(plugins: list[Any], options: dict[str, Any], length: str) -> None:
    said = " ".join(" ".join(plan(*plugins, **options)[3:]).split())
    assert said.startswith(f"length: {length}")


class Embeds(Plugin):
    """Says what it will do, in more than a line."""

    @on(BatchStart)
    def act(self, run: Run, event: BatchStart) -> None:
        """Do nothing."""

    def describe(self, run: Run) -> str:
        """Say it."""
        return f"writes embeddings of all {run.length.max_epochs} epochs to " + "a/very/long/path/" * 3


def test_plugins_say_what_they_will_do_in_lines_of_eighty_columns() -> None:
    lines = plan(Embeds(), VALIDATES, epochs=2, validation={"a": BATCHES, "b": BATCHES})
    assert lines[4:7] == [
        "  validation: 2 sets a, b",
        "  embeds: writes embeddings of all 2 epochs to",
        "    a/very/long/path/a/very/long/path/a/very/long/path/",
    ]


def test_a_plan_trains_nothing_and_leaves_the_trainer_free() -> None:
    trainer, task = Trainer([Embeds()], device="cpu"), linear_classifier()
    before = [each.clone() for each in task.model.parameters()]
    trainer.plan(task, BATCHES, optimizer=sgd(), epochs=1)
    assert all(torch.equal(one, other) for one, other in zip(before, task.model.parameters(), strict=True))
    assert trainer.fit(task, BATCHES, optimizer=sgd(), epochs=1).progress.steps == 6


def test_the_plan_ends_with_the_handlers_and_without_a_task_is_only_these() -> None:
    trainer = Trainer([Embeds()], device="cpu")
    assert trainer.plan().split() == ["batch_start", "DECIDE", "embeds"]
    assert trainer.plan(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1).endswith(f"\n\n{trainer.plan()}")


def test_an_observer_that_cannot_say_what_it_will_do_is_forgiven() -> None:
    class Broken(Embeds):
        policy = "observer"

        def describe(self, run: Run) -> str:
            raise KeyError("where")

    class Asks(Plugin):
        @on(EpochStart)
        def ask(self, run: Run, event: EpochStart) -> None:
            run.report.plan()

    result = Trainer([Broken(), Asks()], device="cpu").fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=1)
    assert_each(result.warnings, ("'broken'", "describe", "KeyError: 'where'"))


def test_a_training_logs_its_plan_and_where_it_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit(epochs: int) -> str:
        caplog.clear()
        plugins = [SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path, resume="auto")]
        Trainer(plugins, device="cpu").fit(linear_classifier(), BATCHES, optimizer=sgd(), epochs=epochs)
        return " ".join(" ".join(caplog.messages).split())

    with caplog.at_level(logging.INFO, logger="heliograph"):
        assert_facts(fit(1), "starts fresh", "'run'", tmp_path)
        assert f"step 6 from {tmp_path / 'run_epoch_1_iter_6.pth'}" in fit(2)
    assert fit(2) == ""


def test_the_length_of_a_resumed_run_is_what_is_done_and_the_rest(tmp_path: Path) -> None:
    def length(size: int, epochs: int) -> str:
        data = TensorDataset(torch.randn(12, 4), torch.zeros(12).long())
        trainer, said = Trainer([SaveSchedule(Every(epochs=1)), Checkpoint(tmp_path, resume="auto")], device="cpu"), []
        trainer.bus.on(EpochStart, lambda run, event: said.append(run.report.plan()), when=Once())
        trainer.fit(linear_classifier(), data, optimizer=sgd(), epochs=epochs, loader_params={"batch_size": size})
        return str(said[0]).splitlines()[3]

    assert_facts(length(2, 2), "2 epochs", "12 steps", "6 batches", "global batch 2")
    assert_facts(length(4, 3), "3 epochs", "15 steps", "3 batches", "global batch 4")


def test_a_window_ends_with_its_epoch() -> None:
    lines = plan(GradientAccumulation(300), epochs=2)
    facts = ("2 epochs", "2 steps", "6 batches an epoch", "6 batches a step", "global batch 18")
    assert_facts(" ".join(" ".join(lines[3:5]).split()), *facts)


def test_a_repl_shows_plans_as_lines() -> None:
    trainer = Trainer([VALIDATES, LogSchedule(steps=1)], device="cpu")
    options: dict[str, Any] = {"optimizer": sgd(), "epochs": 1}
    handlers = trainer.plan()
    whole = trainer.plan(linear_classifier(), BATCHES, validation=BATCHES, **options)
    of_run = trainer.run(linear_classifier(), BATCHES, validation=BATCHES, **options).report.plan()

    assert repr(handlers).splitlines()[0] == "train_start"
    assert repr(of_run).splitlines()[0] == "run 'run'"
    assert repr(whole) == f"{of_run}\n\n{handlers}" == whole
    assert isinstance(whole, str)
    assert repr(Trainer(device="cpu").plan()) == "no handlers"
