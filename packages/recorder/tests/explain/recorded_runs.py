"""Five recorded runs, which `python recorded_runs.py FOLDER` trains: one for each way to end."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path

import heliograph as h
import torch
from heliograph.tests.kills import Killer, in_a_child
from heliograph_recorder import Recorder
from heliograph_recorder.command import status
from torch import nn


class KillerAtStep(Killer):
    affects_training = False

    @h.on(h.StepEnd, lane=h.Lane.REPORT)
    def kill(self, run: h.Run, event: h.StepEnd) -> None:
        self.act("step")


class Fails(h.Plugin):
    @h.on(h.BatchEnd)
    def fail(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.steps == 5:
            raise OSError("the disk is gone")


class Status(h.Plugin):
    """Prints the status of the run into a file, while it trains."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @h.on(h.StepEnd)
    def print_status(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 6:
            with self.file.open("w") as file, redirect_stdout(file):
                status([str(self.file.parent), "--json"])


def train(folder: Path, *plugins: h.Plugin, epochs: int = 3, lr: float = 0.1) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 2)
    batches = [(part, part.sum(1, keepdim=True)) for part in inputs.view(4, 4, 2)]
    all_plugins = [
        h.LogSchedule(steps=2),
        h.ValidationSchedule(epochs=1),
        h.Checkpoint(
            folder, every=h.Every(steps=4), keep_last=1, keep_best=1, monitor="validation/loss", resume="auto"
        ),
        Recorder(folder),
        *plugins,
    ]
    h.Trainer(all_plugins, device="cpu").fit(
        h.Supervised(nn.Linear(2, 1), nn.functional.mse_loss),
        batches,
        validation=batches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        epochs=epochs,
        name=folder.name,
    )


if __name__ == "__main__":
    root = Path(sys.argv[1])
    train(root / "finished")
    train(root / "stopped", h.EarlyStopping("validation/loss", patience=1, min_delta=100.0), epochs=9)
    in_a_child(lambda: train(root / "resumed", KillerAtStep("step", 7)), killed=True, about="resumed")
    train(root / "resumed")
    with suppress(OSError):
        train(root / "failed", Fails())
    train(root / "running", Status(root / "running" / "status.json"))
