"""Train on two processes, let one of them ask for a stop, and finish on a single process.

    python docs/examples/two_ranks.py
    torchrun --nproc-per-node=2 docs/examples/two_ranks.py  # starts it, too; the line above ends it

What one rank asks, all do at the same step, and the result says which rank asked and why. The global batch and the
order of the samples do not depend on the number of processes, so the training continues with as many as there are,
in the middle of an epoch, too. The 297 samples of the validation are not a multiple of two, and each counts once.
"""

from __future__ import annotations

import os
from pathlib import Path

import heliograph as h
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import is_torchelastic_launched
from torch.utils.data import TensorDataset, random_split


class Notice(h.Plugin):
    """Stop when the machine of rank 1 is to be given back: here, after 75 steps; all ranks stop one step later."""

    asks = ("stop",)

    @h.on(h.StepEnd)
    def look(self, run: h.Run, event: h.StepEnd) -> None:
        """Look at a clock that this rank alone can see."""
        if run.engine.rank == 1 and run.progress.steps == 75:
            run.control.stop("this machine is given back")


def train() -> str:
    """Train, on however many processes there are, and return how it ended, with a sum over its weights."""
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    training, held_out = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    task = h.Supervised(model, nn.functional.cross_entropy, metrics={"accuracy": h.accuracy})
    checkpoint = h.Checkpoint("runs/two_ranks", every=h.Every(epochs=1), resume="auto")
    result = h.Trainer([h.RNGCapture(), h.ValidationSchedule(epochs=1), checkpoint, Notice()]).fit(
        task,
        training,
        loader_params={"global_batch_size": 50, "shuffle": True},
        validation=held_out,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.003),
        epochs=10,
    )
    asked = f", asked {result.stopped_by} on rank {result.stopped_on_rank}" if result.stopped_by else ""
    weights = sum(each.double().abs().sum().item() for each in model.parameters())
    done = f"{result.status} after {result.progress.steps} steps: {result.reason}{asked}"
    return f"{done}; accuracy {result.metrics['validation/accuracy']:.6f}, weights {weights:.10f}"


def main() -> None:
    """Train as one of torchrun's processes, or on two of our own and then alone."""
    if is_torchelastic_launched():
        print(f"rank {os.environ['RANK']}: {train()}")
        return
    if not Path("runs/two_ranks").exists():
        for rank, outcome in enumerate(h.launch(train, nprocs=2)):
            print(f"rank {rank}: {outcome}")
    print(f"alone: {train()}")


if __name__ == "__main__":
    main()
