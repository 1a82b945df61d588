"""A training that torchrun starts in tests: `python torchrun_job.py FOLDER [RANK]` kills that rank once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from heliograph import Checkpoint, DDPEngine, Every, RNGCapture, SaveSchedule, Supervised, Trainer
from heliograph_testing.chaos import Chaos, Fault
from torch import Tensor, nn
from torch.utils.data import TensorDataset

KILLED_AT = 11  # micro-batches of a rank; a checkpoint is two steps old then


def train(folder: Path, killed: int | None = None) -> tuple[int | None, dict[str, Tensor]]:
    """Train three epochs of 64 samples, with draws in the model; return the step that was resumed, and the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plugins: list[Any] = [RNGCapture(seed=1), SaveSchedule(Every(steps=3)), Checkpoint(folder, resume="auto")]
    if killed is not None:
        kill = Fault("kill", count=KILLED_AT, rank=killed)
        plugins.append(Chaos([kill], journal=folder / "faults" / "journal.jsonl"))  # which remembers it
    result = Trainer(plugins, engine=DDPEngine(timeout=60.0)).fit(
        Supervised(model, nn.functional.mse_loss),
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        loader_params={"batch_size": 4, "shuffle": True},
        optimizer=optimizer,
        epochs=3,
    )
    assert result.resume is not None
    return result.resume.step, model.state_dict()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.save(train(place, int(sys.argv[2]) if len(sys.argv) > 2 else None), place / f"rank {os.environ['RANK']}.pt")
