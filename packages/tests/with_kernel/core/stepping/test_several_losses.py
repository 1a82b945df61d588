"""Tasks that yield several losses, each with an optimizer of its own, as in adversarial training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heliograph import (
    DeviceEngine,
    Every,
    GradientAccumulation,
    GradientClipping,
    LogSchedule,
    Run,
    RunResult,
    Task,
    Trainer,
)
from heliograph.core.task import Losses
from heliograph.packages.tests.waits import NoWaits, no_waits_on_a_gpu
from heliograph.tests.kit import adam
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

Batch = tuple[Tensor]


def data(batches: int = 7) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator),) for _ in range(batches)]


class Gan(Task):
    """A small adversarial task; each part can be asked to leave its loss out, or to spoil it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.leave_out: Callable[[Run, str], bool] = lambda run, name: False
        self.spoil: Callable[[Run, str], float] = lambda run, name: 1.0

    def discriminator_loss(self, real: Tensor, fake: Tensor) -> Tensor:
        judged, drawn = self.discriminator(real), self.discriminator(fake.detach())
        return cross_entropy(judged, torch.ones_like(judged)) + cross_entropy(drawn, torch.zeros_like(drawn))

    def generator_loss(self, fake: Tensor) -> Tensor:
        judged = self.discriminator(fake)
        return cross_entropy(judged, torch.ones_like(judged))

    def training_step(self, run: Run, batch: Batch) -> Losses:
        (real,) = batch
        fake = self.generator(torch.randn(len(real), 2, device=real.device))
        if not self.leave_out(run, "discriminator"):
            yield "discriminator", self.discriminator_loss(real, fake) * self.spoil(run, "discriminator")
        if not self.leave_out(run, "generator"):
            yield "generator", self.generator_loss(fake) * self.spoil(run, "generator")

    def weights(self) -> list[Tensor]:
        parts = (self.generator, self.discriminator)
        return [each.detach().clone() for part in parts for each in part.parameters()]


def train(
    *plugins: Any, task: Gan | None = None, engine: DeviceEngine | None = None, **options: Any
) -> tuple[Gan, RunResult]:
    mine, trainer = task or Gan(), Trainer(plugins, engine=engine or DeviceEngine("cpu"))
    torch.manual_seed(1)
    options = {"optimizer": {"discriminator": adam(), "generator": adam()}, "epochs": 3, **options}
    result = trainer.fit(mine, options.pop("train", data()), **options)
    return mine, result


# Equal to a loop written by hand.


# What it emits, counts and measures.


# Losses that are not there for every batch.


# Dropped steps.


# Resumed, and turned back.


# A loop of one's own.


# Refused.


class Yields(Gan):
    """Yields whatever it is asked to."""

    def __init__(self, *items: Any) -> None:
        super().__init__()
        self.items = items
        self.closed = False

    def training_step(self, run: Run, batch: Batch) -> Losses:
        loss = self.discriminator_loss(batch[0], batch[0])
        try:
            for item in self.items:
                yield item(loss) if callable(item) else item
        finally:
            self.closed = True


# Several steps of one optimizer per batch, as of the critic of a Wasserstein GAN.


# Other moments for each scheduler.


# On several ranks.


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_no_step_waits_for_the_device(precision: Any) -> None:
    watch, pinned = NoWaits(no_waits_on_a_gpu, range(3, 6)), [(real.pin_memory(),) for (real,) in data(12)]
    plugins = [GradientAccumulation(2), GradientClipping(1.0), LogSchedule(Every(epochs=1)), watch]
    _, result = train(*plugins, engine=DeviceEngine("cuda", precision=precision), train=pinned, epochs=1)
    assert result.progress.steps == 6
    assert watch.batches == 6
