"""Runs that continue from checkpoints of Helios."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph import (
    Checkpoint,
    EarlyStopping,
    Every,
    LearningRate,
    RNGCapture,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    ValidationSchedule,
)
from heliograph.core.checkpoint.storage import reader
from heliograph.packages.cli.tests.checkpoints.helios_files import migrate
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCHES = 3, 4
FILE = "golden_epoch_1_iter_4.pth"


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25), nn.Linear(3, 1))


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_scheduler(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=5, gamma=0.5)


def write(folder: Path) -> None:
    """Write what Helios saves after an epoch."""
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(0.125)
    optimizer = make_optimizer(list(model.parameters()))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": make_scheduler(optimizer)}
    saved = {
        "version": "1.0.0",
        "training_state": {
            "current_iteration": 4,
            "global_iteration": 4,
            "global_epoch": 1,
            "validation_cycles": 1,
            "dataset_iter": 0,
        },
        "model": {name: part.state_dict() for name, part in parts.items()},
        "rng": {
            "torch": torch.get_rng_state(),
            "rand": random.getstate(),
            "numpy": np.random.default_rng(1).bit_generator.state,
        },
    }
    folder.mkdir(exist_ok=True)
    torch.save(saved, folder / FILE)


def fit(checkpoint: Checkpoint) -> RunResult:
    inputs = torch.arange(32.0).reshape(16, 2) / 32
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    schedules = [LearningRate("step"), ValidationSchedule(Every(epochs=1)), SaveSchedule(Every(epochs=1))]
    plugins = [RNGCapture(6691), EarlyStopping(patience=50), *schedules, checkpoint]
    return Trainer(plugins, device="cpu").fit(
        Supervised(make_model(), nn.functional.mse_loss),
        DataLoader(data, batch_size=4, shuffle=True),
        validation=DataLoader(data, batch_size=8),
        optimizer=make_optimizer,
        scheduler=make_scheduler,
        name="golden",
        epochs=EPOCHS,
    )


def test_a_run_continues_from_a_migrated_one(tmp_path: Path) -> None:
    write(tmp_path)
    migrate(tmp_path)
    weights = reader.load(tmp_path / FILE)["modules"]["model"]["0.weight"]
    result = fit(Checkpoint(tmp_path, resume="auto"))
    assert torch.equal(weights, torch.full((3, 2), 0.125))
    place = result.progress
    assert (place.epoch, place.steps, place.samples) == (EPOCHS, EPOCHS * BATCHES, 32)
    assert result.resume is not None
    assert result.resume.reasons
    assert "early_stopping" in result.resume.fresh_plugins
    assert "rng_capture" not in result.resume.fresh_plugins


def test_one_that_was_not_migrated_is_not_resumed(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint migrate .*\.pth"):
        fit(Checkpoint(tmp_path, resume=tmp_path / FILE))

    result = fit(Checkpoint(tmp_path, keep_last=None, resume="auto"))
    assert result.resume is None or result.resume.path is None
    assert any("checkpoint migrate" in note for note in result.notes)
    assert any("starts fresh" in warning for warning in result.warnings)
    assert (tmp_path / FILE).read_bytes() == before
