"""A training that torchrun starts in tests: `python torchrun_job.py FOLDER [RANK]` kills that rank once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from heliograph import BatchEnd, Checkpoint, DDPEngine, Every, RNGCapture, SaveSchedule, Supervised, Trainer, on
from torch import Tensor, nn
from torch.utils.data import TensorDataset

KILLED_AT = 11  # micro-batches of a rank; a checkpoint is two steps old then


class KillOnce:
    """Kills one rank, in the first attempt only."""

    name = "kill_once"
    ranks = "all"

    def __init__(self, folder: Path, rank: int) -> None:
        self.done, self.rank = folder / "killed", rank

    @on(BatchEnd)
    def kill(self, run: Any, event: BatchEnd) -> None:
        """Die as a process does that the system kills."""
        if run.engine.rank == self.rank and run.progress.batches == KILLED_AT and not self.done.exists():
            self.done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, killed: int | None = None) -> tuple[int | None, dict[str, Tensor]]:
    """Train three epochs of 64 samples, with draws in the model; return the step that was resumed, and the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plugins: list[Any] = [RNGCapture(seed=1), SaveSchedule(Every(steps=3)), Checkpoint(folder, resume="auto")]
    if killed is not None:
        plugins.append(KillOnce(folder, killed))
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
