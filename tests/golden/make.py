"""Write the golden checkpoints of the present schema: `python tests/golden/make.py FOLDER`.

Every schema that was ever released keeps its files here, and the tests go on from each of them. Run this once for a new
schema, with the code that writes it; never again for an old one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from heliograph import (
    Checkpoint,
    EarlyStopping,
    Every,
    FileLog,
    JsonlLog,
    LearningRate,
    LogSchedule,
    RNGCapture,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
)
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

NAME = "golden"
EPOCHS = 3
BATCHES = 4  # in an epoch


def make_data() -> TensorDataset:
    """Return the same 16 samples each time, whatever the generators do."""
    inputs = torch.arange(32.0).reshape(16, 2) / 32
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def make_task() -> Supervised:
    """Return the small network, the same each time."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).reshape(parameter.shape))
    return Supervised(model, nn.functional.mse_loss)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return one that keeps a state of its own."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fit(checkpoint: Checkpoint, logs: Path, *, epochs: int, steps: int | None = None) -> RunResult:
    """Train with a plugin of every kind that keeps a state."""
    plugins = [
        RNGCapture(),
        EarlyStopping(patience=50),
        JsonlLog(logs / "log.jsonl"),
        FileLog(logs),
        LearningRate("step"),
        LogSchedule(Every(steps=3)),
        ValidationSchedule(Every(epochs=1)),
        SaveSchedule(Every(epochs=1), at_end=True),
        checkpoint,
    ]
    return Trainer(plugins, device="cpu").fit(
        make_task(),
        DataLoader(make_data(), batch_size=4, shuffle=True),
        validation=DataLoader(make_data(), batch_size=8),
        optimizer=make_optimizer,
        scheduler=lambda optimizer: StepLR(optimizer, step_size=5, gamma=0.5),
        name=NAME,
        epochs=epochs,
        steps=steps,
    )


def main(folder: Path) -> None:
    """Leave a checkpoint from the border of an epoch and one from the middle of the next."""
    folder = folder.resolve()
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        checkpoint = Checkpoint(folder, keep_last=None, keep_best=1, monitor="validation/loss")
        fit(checkpoint, Path("logs"), epochs=EPOCHS, steps=BATCHES + 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
