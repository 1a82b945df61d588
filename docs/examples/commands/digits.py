"""The training that commands.sh runs, records and explains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph_recorder import Recorder
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split


def make(folder: Path = Path("runs/digits")) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a new trainer and the arguments of its fit, as `verify-resume` takes them too."""
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    train, held_out = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    checkpoint = h.Checkpoint(folder, every=h.Every(epochs=1), keep_best=1, monitor="validation/loss")
    schedules = [
        h.LogSchedule(steps=10),
        h.ValidationSchedule(epochs=1),
        h.EarlyStopping("validation/loss", patience=3),
    ]
    trainer = h.Trainer([h.RNGCapture(), *schedules, checkpoint, Recorder(folder), h.ProgressBar()])
    return trainer, {
        "task": h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy}),
        "train": train,
        "loader_params": {"batch_size": 50, "shuffle": True},
        "validation": held_out,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "epochs": 30,
    }


if __name__ == "__main__":
    trainer, arguments = make()
    print(trainer.fit(**arguments))
