"""Train a small CNN on the handwritten digits that ship inside scikit-learn, with every built-in plugin."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import heliograph as h
import torch
from heliograph.core.extras import require
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .report import curves, summary


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 x 8 pixels in three fixed, disjoint parts: train, validation, test."""
    bunch = require("sklearn.datasets", "The demo", extra="examples").load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = torch.split(order, [1197, 300, 300])
    train, validation, test = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, validation, test


def network() -> nn.Module:
    """Return a CNN of about 20,000 parameters for (batch, 1, 8, 8) images; gives (batch, 10) scores."""
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


class Shift(h.Plugin):
    """A plugin of the demo's own: moves every training image by up to one pixel."""

    @h.on(h.BatchStart, lane=h.Lane.TRANSFORM)
    def shift(self, run: h.Run, event: h.BatchStart) -> None:
        """Replace the batch."""
        images, labels = run.batch
        down, right = torch.randint(-1, 2, (2,)).tolist()
        moved: Tensor = torch.roll(images, (down, right), (2, 3))
        run.batch = moved, labels


def plugins(folder: Path) -> list[h.Plugin]:
    """Return all that the demo uses, in order."""
    return [
        h.RNGCapture(),
        Shift(),
        h.GradientAccumulation({0: 1, 10: 2}),
        h.GradientClipping(norm=5.0),
        h.NaNGuard("raise"),
        h.LearningRate("plateau", monitor="validation/loss"),
        h.LogSchedule(h.Every(steps=10)),
        h.ValidationSchedule(h.Every(epochs=1)),
        h.EarlyStopping("validation/loss", patience=8, min_delta=1e-3),
        h.SaveSchedule(h.Every(epochs=1)),
        h.Checkpoint(
            folder / "checkpoints",
            metadata="accuracy_{validation/accuracy:.4f}",
            keep_last=2,
            keep_best=1,
            monitor="validation/loss",
        ),
        h.ProgressBar(),
        h.TensorBoard(folder / "tensorboard"),
        h.JsonlLog(folder / "log.jsonl"),
        h.FileLog(folder),
        h.ExceptionPassThrough(train=[FloatingPointError, OSError, ValueError]),
        h.HandlerTimes(),
    ]


def forget(folder: Path) -> None:
    """Remove what a former demo left, and nothing else."""
    for pattern in ("checkpoints/digits_epoch_*.pth", "tensorboard/**/events.out.tfevents.*", "digits_*.log"):
        for path in folder.glob(pattern):
            path.unlink()


def run_demo(folder: Path, epochs: int) -> float:
    """Train, test the best checkpoint, leave the curves, print a summary; return the test accuracy.

    Args:
        folder: where to leave checkpoints, logs and the picture.
        epochs: at most so many; early stopping ends it sooner.
    """
    began = perf_counter()
    forget(folder)
    torch.manual_seed(6691)
    train, validation, test = digits()
    model = network()
    task = h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = h.Trainer(plugins(folder))
    result = trainer.fit(
        task,
        DataLoader(train, batch_size=64, shuffle=True),
        validation=DataLoader(validation, batch_size=300),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3),
        epochs=epochs,
        name="digits",
        hyper_parameters={"lr": 3e-3, "batch_size": 64},
    )
    assert result.best_checkpoint is not None
    best = h.load_weights(task, result.best_checkpoint)
    with trainer.plugins.disabled("progress"):
        tested = trainer.test(task, DataLoader(test, batch_size=300), name="digits")
    accuracy = tested.metrics["test/accuracy"]
    curves(folder / "log.jsonl", folder / "curves.png")
    print(summary(result, best, accuracy, folder, perf_counter() - began))
    return accuracy
