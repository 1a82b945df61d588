"""The model, the plugins and the training of the demo."""

from __future__ import annotations

from pathlib import Path

import heliograph as h
import torch
from heliograph import RunResult
from heliograph_recorder import Recorder
from torch import nn
from torch.utils.data import DataLoader

from .data import Augmented, digits

NAME = "digits"
EVERY = 12  # steps between two validations, each with a save; most of them are within an epoch
SHOWN = ["train/loss", "validation/loss", "validation/accuracy"]


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
        loader_params={
            "batch_size": 64,
            "shuffle": True,
            "num_workers": workers,
            "persistent_workers": workers > 0,
        },
        validation=DataLoader(validation, batch_size=300),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3),
        epochs=epochs,
        name=NAME,
        hyper_parameters={"lr": 3e-3, "batch_size": 64},
    )
