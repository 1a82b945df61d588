"""The functions of trials, in a module that their processes can import."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import heliograph as h
import torch
from heliograph.tests.kit import sgd
from heliograph_recorder.demo.training import digits as load_digits
from ray import tune as ray_tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    pass

Line = dict[str, Any]


class NotTodayError(Exception):
    """An error of the user's own."""

    def __init__(self, what: str, *, day: str) -> None:
        super().__init__(what)
        self.day = day


class TrainLog(h.Plugin):
    """Log each epoch, and the end of each run at its last event, `RunClosed`."""

    def __init__(self, folder: str, key: str) -> None:
        self.file = Path(folder) / f"{key}.log"

    @h.on(h.EpochEnd)
    def log_epoch(self, run: h.Run, event: h.EpochEnd) -> None:
        group = run.optimizers["optimizer"].param_groups[0]
        weights = [value for each in run.task.model.parameters() for value in each.flatten().tolist()]
        line = {"epoch": event.epoch + 1, "lr": group["lr"], "momentum": group["momentum"], "weights": weights}
        self._write(run, line)

    @h.on(h.RunClosed)
    def log_end(self, run: h.Run, event: h.RunClosed) -> None:
        self._write(run, {"closed": event.status, "step": run.progress.steps, "notes": run.report.notes})

    def _write(self, run: h.Run, line: Line) -> None:
        if run.engine.is_main:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_log(folder: Path, key: str) -> tuple[list[Line], list[Line]]:
    """Return the epochs and the ends that a trial has logged."""
    lines = [json.loads(line) for line in (folder / f"{key}.log").read_text().splitlines()]
    return [each for each in lines if "epoch" in each], [each for each in lines if "closed" in each]


def digits(config: dict[str, Any]) -> None:
    """Train a small network on the digits."""
    torch.manual_seed(0)
    train, validation, _ = load_digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    h.Trainer(_plugins(config, f"{config['lr']:g}"), use_cpu=True).fit(
        h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy}),
        train,
        loader_params={"global_batch_size": 64, "shuffle": True},
        validation=DataLoader(validation, batch_size=300),
        optimizer=sgd(config["lr"], momentum=0.9),
        epochs=config["epochs"],
        name="digits",
    )


def scheduled(config: dict[str, Any], *plugins: h.Plugin, resume: str | None = None, epochs: int = 5) -> None:
    """Train a small model with a scheduler, in a trial or without Ray."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 4, generator=generator), torch.randint(0, 2, (24,), generator=generator))
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    trainer = h.Trainer([*_plugins(config, config["key"], resume), h.LearningRate("epoch"), *plugins], use_cpu=True)
    trainer.fit(
        h.Supervised(model, nn.functional.cross_entropy),
        data,
        loader_params={"global_batch_size": 8, "shuffle": True},
        validation=DataLoader(data, batch_size=24),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        epochs=epochs,
        name="scheduled",
    )


def log_by_trial_id(config: dict[str, Any]) -> None:
    """Train, and log under the id of the trial."""
    scheduled({**config, "key": ray_tune.get_context().get_trial_id()[-1]})


class FailOnce(h.Plugin):
    """After the third epoch, once: raise, or send a signal to a process."""

    def __init__(self, folder: str, victim: int | None, signum: int) -> None:
        self.flag, self.victim, self.signum = Path(folder) / "failed", victim, signum

    @h.on(h.EpochStart)
    def fail(self, run: h.Run, event: h.EpochStart) -> None:
        if run.progress.epoch == 3 and run.engine.is_main and not self.flag.exists():
            self.flag.touch()
            if self.victim is None:
                raise NotTodayError("the disk is on fire", day="Friday")
            os.kill(self.victim, self.signum)
            if self.signum == signal.SIGKILL:
                signal.pause()


def fail_once(config: dict[str, Any]) -> None:
    """Train, with a failure after the third epoch."""
    scheduled(config, FailOnce(config["folder"], config.get("victim"), config.get("signum", signal.SIGKILL)))


def failing(config: dict[str, Any]) -> None:
    """Train, or fail."""
    if config["fails"]:
        raise NotTodayError(f"trial {config['key']} fails", day="Friday")
    scheduled(config, epochs=1)


def _plugins(config: dict[str, Any], key: str, resume: str | None = None) -> Sequence[h.Plugin]:
    every = h.Every(epochs=1)
    checkpoint = h.Checkpoint("checkpoints", keep_last=None, resume=resume)
    return [
        h.RNGCapture(),
        h.ValidationSchedule(every),
        h.SaveSchedule(every),
        checkpoint,
        TrainLog(config["folder"], key),
    ]
