"""Write golden runs over data that draw: `python packages/tests/golden/make_draws.py FOLDER`, in a new folder.

`draws_1` holds those of commit cf23987: of one process, of one with two loader workers, and of two ranks, each stopped
in its second epoch, with its checkpoints, its recording and, in `whole.json`, the losses and the weights of the run
that nothing stops. Whatever loading becomes later, the tests resume them and compare to the last bit; so they stay as
they are, except that `ranks` was removed from the layout of the data when nothing used it any more.

All numbers are small multiples of a power of two, so that every sum is exact, in whatever order: the files are right on
any machine and with any torch.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from heliograph import (
    Checkpoint,
    DDPEngine,
    Every,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    Task,
    Trainer,
    launch,
)
from heliograph_recorder import Recorder
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NAME = "draws"
EPOCHS, BATCHES, STOP = 3, 4, 6
KINDS = {"alone": (1, 0), "workers": (1, 2), "ranks": (2, 0)}  # processes, and the workers of each
PART = 256


class Noisy(Dataset[Tensor]):
    """Draws from every generator that a key reaches, an odd number of normal numbers among them."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.randrange(PART), int(np.random.randint(PART)), int(torch.randint(PART, ()))]
        normal = random.gauss(0, 1) > 0, float(np.random.randn()) > 0, float(torch.randn(())) > 0
        held = [self.python.randrange(PART), int(self.numpy.integers(PART))]
        held.append(int(torch.randint(PART, (), generator=self.torch)))
        seedless = int(np.random.default_rng().integers(PART))
        return torch.tensor([index, *drawn, *normal, *held, seedless], dtype=torch.float64) / PART


class Sums(Task):
    """The gradient is the batch, of which a draw of the training leaves out a half."""

    def __init__(self) -> None:
        self.model = nn.Linear(11, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.model.weight)
        self.losses: list[float] = []

    def training_step(self, run: Run, batch: Tensor) -> Tensor:
        """Return the mean output, and keep it."""
        loss: Tensor = self.model(batch * torch.randint(2, (11,))).mean()
        self.losses.append(loss.item())
        return loss


def fit(
    kind: str, *more: Plugin, steps: int | None = None, workers: int | None = None
) -> tuple[dict[str, Any], RunResult]:
    """Train; return the losses of this process and the weights, and the result.

    Args:
        kind: how many processes and loader workers, by its name.
        more: plugins.
        steps: where to stop.
        workers: instead of as many as the kind has.
    """
    processes, usual = KINDS[kind]
    task, plugins = Sums(), [RNGCapture(6691), SaveSchedule(Every(epochs=1), at_end=True), *more]
    trainer = Trainer(plugins, engine=DDPEngine(device="cpu")) if processes > 1 else Trainer(plugins, device="cpu")
    loader = DataLoader(Noisy(), 4 // processes, shuffle=True, num_workers=usual if workers is None else workers)
    result = trainer.fit(
        task,
        loader,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1 / 8, momentum=1 / 2),
        name=NAME,
        epochs=EPOCHS,
        steps=steps,
    )
    return {"losses": task.losses, "weights": task.model.weight[0].tolist()}, result


def write(folder: Path, kind: str) -> None:
    """Leave a checkpoint from the middle of an epoch, of a single process its border too, the recording, the whole."""
    fit(kind, Checkpoint(folder, keep_last=None if kind == "alone" else 1), Recorder(folder, losses=True), steps=STOP)
    whole, _ = fit(kind)
    rank = os.environ.get("RANK", "0")
    (folder / f"whole_{rank}.json").write_text(json.dumps(whole, indent=1) + "\n")


def main(folder: Path) -> None:
    """Write the files of each kind."""
    folder = folder.resolve()
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        for kind, (processes, _) in KINDS.items():
            place = Path("golden") / kind
            if processes == 1:
                write(place, kind)
            else:
                launch(write, place, kind, nprocs=processes)
        shutil.copytree("golden", folder, ignore=shutil.ignore_patterns("*.lock", ".*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
