"""The data, the model, the plugins and the training of the demo."""

from __future__ import annotations

import random
from pathlib import Path

import heliograph as h
import numpy as np
import torch
from heliograph import RunResult
from heliograph.spi import require
from heliograph_recorder import Recorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

NAME = "digits"
EVERY = 12  # steps between two validations, each with a save; most of them are within an epoch
SHOWN = ["train/loss", "validation/loss", "validation/accuracy"]


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Shifts an image by up to one pixel, changes its contrast and adds noise, differently in each epoch.

    It draws from all three global generators, like augmentation libraries. Heliograph seeds them by the position of the
    batch, so the draws depend neither on the worker nor on a resume.
    """

    def __init__(self, digits: TensorDataset) -> None:
        self.images, self.labels = digits.tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = random.choices((-1, 0, 1), k=2)  # noqa: S311  # not for cryptography
        contrast = np.random.uniform(0.9, 1.1)
        moved = torch.roll(self.images[index], (down, right), (1, 2))
        return contrast * moved + 0.02 * torch.randn_like(moved), self.labels[index]


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 x 8 pixels in three fixed, disjoint parts: train, validation, test."""
    require("matplotlib", "The demo", extra="examples")  # before the training, not at its end
    bunch = require("sklearn.datasets", "The demo", extra="examples").load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = torch.split(order, [1197, 300, 300])
    train, validation, test = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, validation, test


def network() -> nn.Module:
    """Return a CNN with about 20,000 parameters, from images (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def task() -> h.Supervised:
    """Return the network with its loss and metric."""
    torch.manual_seed(6691)
    return h.Supervised(network(), nn.functional.cross_entropy, metrics={"accuracy": h.accuracy})


def training_plugins(folder: Path, *, background: bool = True) -> list[h.Plugin]:
    """Return the plugins that affect the training."""
    return [
        h.RNGCapture(),
        h.GradientAccumulation({0: 1, 10: 2}),
        h.GradientClipping(norm=5.0),
        h.NaNGuard("raise"),
        h.LearningRate("plateau", monitor="validation/loss"),
        h.LogSchedule(h.Every(steps=EVERY)),
        h.ValidationSchedule(h.Every(steps=EVERY), at_end=True),
        h.EarlyStopping("validation/loss", patience=8, min_delta=1e-3),
        h.SaveSchedule(h.Every(steps=EVERY), at_end=True),
        h.Checkpoint(
            folder / "checkpoints",
            keep_last=2,
            keep_best=1,
            monitor="validation/loss",
            resume="auto",
            background=background,
        ),
        h.CheckpointLabel("accuracy_{validation/accuracy:.4f}"),
        h.ExceptionPassThrough(train=[FloatingPointError, OSError, ValueError]),
    ]


def reporting_plugins(folder: Path) -> list[h.Plugin]:
    """Return the plugins that only report."""
    return [
        h.ProgressBar(metrics=SHOWN),
        h.TensorBoard(folder / "tensorboard"),
        h.JsonlLog(folder / "log.jsonl"),
        h.FileLog(folder),
        Recorder(folder),
    ]


def train(trainer: h.Trainer, supervised: h.Supervised, epochs: int, *, workers: int = 2) -> RunResult:
    """Train from the newest checkpoint, or from the start. The number of workers does not change any image."""
    torch.set_num_threads(1)  # several processes of the demo train at the same time
    training, validation, _ = digits()
    optimizer = torch.optim.AdamW(supervised.model.parameters(), lr=3e-3)
    return trainer.fit(
        supervised,
        Augmented(training),
        loader_params={"batch_size": 64, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0},
        validation=DataLoader(validation, batch_size=300),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3),
        epochs=epochs,
        name=NAME,
        hyper_parameters={"lr": 3e-3, "batch_size": 64},
    )
