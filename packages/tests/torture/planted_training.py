"""A training that has something of everything, met by faults: `python planted_training.py one|background|ranks SEED`.

Its exit status is 0 where the chaos kit finds nothing, 3 where it does, with the report.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import heliograph as h
import numpy as np
import torch
from heliograph.core.program import UsageError
from heliograph.tests.kit import random_batches
from heliograph_testing.chaos import check_function
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FOUND = 3  # another status than that of an error of the kit itself
FAULTS = 8
OF_THE_DISK = ("kill", "full-disk", "clock-jump", "kill")
OF_REQUESTS = ("kill", "preempt")  # by which other checkpoints are there in the end
OF_RANKS = ("kill", "preempt", "kill", "slow")


@cache
def scale() -> list[float]:
    """Return what only the state of the task holds: nobody looks into the cache of a function."""
    return [1.0]


class Task(h.Supervised):
    """Draws from every generator, counts in an attribute and in a state of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, nn.functional.mse_loss)
        self.generator = np.random.default_rng(1)
        self.calls = 0

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        self.calls += 1
        scale()[0] *= 0.999
        own = run.plugins["rng_capture"].generator.random()
        drawn = random.random() + float(np.random.rand()) + float(self.generator.random()) + float(own)
        run.track("drawn", drawn)
        return super().training_step(run, (batch[0] + 0.1 * drawn, batch[1])) * scale()[0] + 1e-3 * (self.calls % 7)

    def state_dict(self) -> dict[str, float]:
        return {"scale": scale()[0]}

    def load_state_dict(self, state: dict[str, float]) -> None:
        scale()[0] = state["scale"]


class Nudge(h.Plugin):
    """Scales the loss by a number that grows at every third boundary."""

    def __init__(self) -> None:
        self.factor = 1.0

    @h.on(h.ShouldStop, when=h.Every(emissions=3))
    def grow(self, run: h.Run, event: h.ShouldStop) -> None:
        self.factor += 0.01

    @h.on(h.BatchStart)
    def scale(self, run: h.Run, event: h.BatchStart) -> None:
        run.control.scale_loss(self.factor, "it grows")

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factor = state.get("factor", 1.0)


class OnRank(h.Plugin):
    """On one rank only, asks for a log, where all ranks ask for a save: else a notice brings it a step earlier."""

    asks = ("log",)

    @h.on(h.StepEnd)
    def ask(self, run: h.Run, event: h.StepEnd) -> None:
        if run.engine.rank == 1 and run.progress.steps % 6 == 3:
            run.control.request_log("rank 1 asks")


def plugins(*, background: bool) -> list[h.Plugin]:
    """Return the plugins of the training."""
    best: dict[str, Any] = {"keep_last": 2, "keep_best": 1, "monitor": "validation/loss", "mode": "max"}
    return [
        h.RNGCapture(),
        h.GradientAccumulation({0: 2, 2: 1}),
        h.GradientClipping(1.0),
        h.LearningRate("step"),
        h.EMA(0.9, every=2),
        h.LogSchedule(h.Every(steps=4)),
        h.EpochMeans(),
        h.ValidationSchedule(h.Every(steps=3)),
        h.SaveSchedule(h.Every(steps=3)),
        h.Checkpoint("runs", resume="auto", background=background, **best),
        h.EarlyStopping("validation/loss", patience=20, min_delta=1.0),  # counts, and never stops
        h.Preemption(),
        Nudge(),
    ]


def train(*, background: bool = False, ranks: bool = False) -> None:
    """Train in the current folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wide = 64 if background else 8  # a state that takes a while to be written
    model = nn.Sequential(nn.Linear(4, wide), nn.BatchNorm1d(wide), nn.Dropout(0.2), nn.Linear(wide, 2))
    task = Task(model)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(60, 4, generator=generator), torch.randn(60, 2, generator=generator))
    engine: Any = h.DDPEngine(device="cpu", timeout=20.0, grace=3.0) if ranks else h.DeviceEngine("cpu")
    more = [OnRank()] if ranks else []
    h.Trainer([*plugins(background=background), *more], engine=engine).fit(
        task,
        data,
        validation=random_batches(2),
        loader_params={"batch_size": 3 if ranks else 6, "shuffle": True},
        optimizer=partial(torch.optim.AdamW, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8),
        epochs=5,
    )


PROGRAMS: dict[str, Callable[[], None]] = {
    "one": train,
    "background": partial(train, background=True),
    "ranks": partial(train, ranks=True),
}


def main(name: str, seed: int) -> int:
    """Check the training; return the exit status."""
    ranks = 2 if name == "ranks" else 1
    kinds = OF_RANKS if ranks > 1 else OF_REQUESTS if seed % 2 else OF_THE_DISK
    try:
        report = check_function(PROGRAMS[name], seed=seed, faults=FAULTS, kinds=kinds, ranks=ranks)
    except UsageError as error:
        print(f"without faults: {error}")
        return FOUND
    print(report)
    return 0 if report.is_good else FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
