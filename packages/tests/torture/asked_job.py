"""A training that people ask from outside: `python asked_job.py FOLDER RANKS`; started again, it resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.tests.kit import random_batches
from heliograph_recorder import Recorder, Remote
from torch import nn

STEPS = 10**9  # it ends when it is stopped or killed
EVENTS: tuple[Any, ...] = (h.ChangeServed, h.Log, h.ValidationEnd, h.SavePoint, h.EpochEnd, h.TrainEnd)
SWITCHED = ("ema", "gradient_norm", "learning_rate")


class Witness(h.Plugin):
    """Writes down what is served on this rank, and after which step."""

    affects_training = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: Any = None

    @h.on(h.TrainStart)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        self.close()
        self.file = (self.folder / f"rank {run.engine.rank}.jsonl").open("a", encoding="utf-8", buffering=1)
        self.write("train_start", 0, "")

    @h.on(*EVENTS, optional=True, lane=h.Lane.MEASURE)
    def note(self, run: h.Run, event: h.Event) -> None:
        about = [event.verb, event.target, event.value, event.by, event.reason, event.refusal] if isinstance(event, h.ChangeServed) else []  # fmt: skip  # noqa: E501
        rate = run.optimizer.param_groups[0]["lr"]
        self.write(event.name, run.progress.steps, [*about, rate, [run.plugins.is_enabled(name) for name in SWITCHED]])

    def write(self, event: str, step: int, about: Any) -> None:
        self.file.write(json.dumps([event, step, about]) + "\n")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def train(folder: Path, *, over_tcp: bool = True) -> tuple[str, int, list[str]]:
    """Train until the run is stopped; return its status, its steps, and the history of this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    engine = h.DDPEngine(device="cpu", timeout=60.0)
    never = h.Every(steps=STEPS)
    plugins: list[h.Plugin] = [
        h.RNGCapture(seed=1),
        h.LearningRate("step"),
        h.EMA(0.9),
        h.GradientNorm(),
        h.LogSchedule(never, at_end=False),
        h.ValidationSchedule(never, at_end=False),
        h.SaveSchedule(h.Every(steps=200), at_end=True),
        Recorder(folder),
        h.Checkpoint(folder, resume="auto"),
        Remote(folder, tcp=0 if over_tcp else None),
        Witness(folder),
    ]
    result = h.Trainer(plugins, engine=engine).fit(
        h.Supervised(model, nn.functional.mse_loss),
        random_batches(100 * engine.world_size),
        validation=random_batches(2 * engine.world_size),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1000),
        steps=STEPS,
    )
    return result.status, result.progress.steps, [str(each) for each in result.history]


if __name__ == "__main__":
    place, ranks = Path(sys.argv[1]), int(sys.argv[2])
    if ranks == 1:
        train(place)
    else:
        h.launch(train, place, nprocs=ranks)
