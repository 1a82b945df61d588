"""The functions that workers call in the tests of reports."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.core.engines.contract import LoopEngine
from heliograph.tests.kit import adam, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Scripted(h.Supervised):
    """Gets worse from the second validation on."""

    def validation_step(self, run: h.Run, batch: Any) -> dict[str, float]:
        return {"loss": float((run.progress.steps - 4) ** 2)}


def train(engine: LoopEngine, folder: Path, name: str, steps: int, **options: Any) -> tuple[list[Tensor], h.RunResult]:
    """Train for some steps; validate and save at every second one."""
    torch.manual_seed(0)
    task = Scripted(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2)), nn.functional.mse_loss)
    data = torch.arange(80.0).reshape(40, 2) / 80
    monitored = h.Checkpoint(folder, keep_best=1, monitor="validation/loss", **options)
    every = h.Every(steps=2)
    schedules = [h.SaveSchedule(every, at_end=False), h.ValidationSchedule(every, at_end=False)]
    result = h.Trainer([h.RNGCapture(3), *schedules, monitored], engine=engine).fit(
        task,
        TensorDataset(data, data),
        loader_params={"batch_size": 2, "shuffle": True},
        validation=DataLoader(TensorDataset(data[:4], data[:4]), batch_size=2),
        optimizer=adam(),
        steps=steps,
        name=name,
    )
    return [value.clone() for value in task.model.state_dict().values()], result


def train_both(folder: Path, steps: int, **options: Any) -> list[tuple[list[Tensor], h.RunResult]]:
    """Train with unsharded checkpoints in a folder of each rank, and with sharded ones in a shared folder."""
    plain, sharded = h.DDPEngine(device="cpu"), h.FSDPEngine(device="cpu", state="sharded")
    own = folder / f"of rank {plain.rank}"
    return [
        train(plain, own, "plain", steps, background=True, **options),
        train(sharded, folder / "shared", "sharded", steps, **options),
    ]


class Breaks(h.Plugin):
    """Replaces the folder of the storage by a file."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage

    @h.on(h.SavePoint, lane=h.Lane.TRANSFORM)
    def break_it(self, run: h.Run, event: h.SavePoint) -> None:
        shutil.rmtree(self.storage)
        self.storage.write_bytes(b"")


def break_the_storage(folder: Path, storage: Path) -> None:
    """Train until a report fails."""
    task = h.Supervised(nn.Linear(2, 2), nn.functional.mse_loss)
    plugins = [h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(folder), Breaks(storage)]
    data = [(torch.ones(2, 2), torch.ones(2, 2))] * 4
    h.Trainer(plugins, device="cpu").fit(task, data, optimizer=sgd(), epochs=1)
