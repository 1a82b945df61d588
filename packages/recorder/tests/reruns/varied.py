"""Random programs with much state: several optimizers, schedulers, averages, dropout, windows, clipping."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import torch
from heliograph.core.checkpoint.checks import check_plain
from heliograph.core.data import rng
from heliograph.core.objects.equality import Leaf, leaves
from heliograph_recorder import Digests, Recorder
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES = 40, 5
OF_THE_FILES = ("recorder", "checkpoint")
State = dict[str, Leaf]


class Pair(h.Task):
    """Two models, whose losses come one by one, each for an optimizer of its own."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self.one, self.other = one, other

    def training_step(self, run: h.Run, batch: Any) -> Any:
        """Yield the losses."""
        inputs, targets = batch
        hidden = self.one(inputs)
        yield "one", (hidden - targets).square().mean()
        yield "other", (self.other(inputs) - hidden.detach()).square().mean()

    def validation_step(self, run: h.Run, batch: Any) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": (self.one(batch[0]) - batch[1]).square().mean()}


def varied(seed: int, folder: Path, *, workers: int = 0) -> tuple[h.Trainer, dict[str, Any]]:
    """Return a trainer and the keywords of its `fit`.

    Args:
        seed: everything random is chosen by this.
        folder: for the recording and the checkpoints.
        workers: of the loader.
    """
    choice = random.Random(f"varied {seed}")
    torch.manual_seed(seed)
    x, y = torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, 1)
    data = TensorDataset(x, y)
    loader = DataLoader(
        data, batch_size=choice.choice([4, 8]), shuffle=True, num_workers=workers, persistent_workers=bool(workers)
    )
    is_pair = choice.random() < 0.5
    plugins: list[Any] = [h.RNGCapture(seed), h.ValidationSchedule(epochs=1), h.LearningRate("step")]
    plugins += [h.EMA(choice.choice([0.5, 0.9]))] * choice.randrange(2)
    plugins += [h.GradientAccumulation(2)] * choice.randrange(2) + [h.GradientClipping(0.5)] * choice.randrange(2)
    plugins += [h.LogSchedule(steps=3), h.SaveSchedule(steps=choice.randrange(2, 7))]
    plugins += [h.Checkpoint(folder, keep_last=None), Recorder(folder, digests=Digests(gradients=1, weights=1))]
    parts: dict[str, Any] = _pair(choice) if is_pair else _single(choice)
    return h.Trainer(plugins, device="cpu"), {
        **parts,
        "train": loader,
        "validation": [(x[:4], y[:4])],
        "epochs": 4,
    }


def _model(choice: random.Random) -> nn.Module:
    norm: list[nn.Module] = [nn.BatchNorm1d(8)] * choice.randrange(2)
    return nn.Sequential(nn.Linear(FEATURES, 8), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def _single(choice: random.Random) -> dict[str, Any]:
    momentum, adam = partial(torch.optim.SGD, lr=0.02, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)
    return {
        "task": h.Supervised(_model(choice), nn.functional.mse_loss),
        "optimizer": choice.choice([momentum, adam]),
        "scheduler": choice.choice([partial(StepLR, step_size=5, gamma=0.9), partial(CosineAnnealingLR, T_max=30)]),
    }


def _pair(choice: random.Random) -> dict[str, Any]:
    return {
        "task": Pair(_model(choice), _model(choice)),
        "optimizer": {"one": partial(torch.optim.AdamW, lr=0.01), "other": partial(torch.optim.SGD, lr=0.02)},
        "scheduler": {"one": partial(StepLR, step_size=5, gamma=0.9), "other": partial(CosineAnnealingLR, T_max=30)},
    }


def state_of(run: Any) -> State:
    """Return all that a run holds: weights, gradients, optimizers, schedulers, plugins, what a save holds beside them.

    The batch in hand and the random generators, too; not what names files.
    """
    progress = run.progress.state_dict()
    del progress["earlier_seconds"]
    plugins = {name: each for name, each in run.plugins.state_dict(check_plain).items() if name not in OF_THE_FILES}
    return leaves(
        {
            "modules": {name: each.state_dict() for name, each in run.modules.items()},
            "gradients": [each.grad for module in run.modules.values() for each in module.parameters()],
            "optimizers": {name: each.state_dict() for name, each in run.optimizers.items()},
            "schedulers": {name: each.state_dict() for name, each in run.schedulers.items()},
            "plugins": plugins,
            "means": run.means.state_dict(),
            "metrics": dict(run.metrics),
            "control": run.control.state_dict(),
            "progress": progress,
            "batch": run.batch,
            "draws": rng.capture(),
        }
    )
