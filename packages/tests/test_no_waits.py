"""No steady step reads a value of a tensor, which would wait for the device where that is a GPU.

The twin on the CPU of what `test_gpu.py` asks of a GPU. Left out are `Checkpoint`, `NaNGuard` and `RollBack`, which
read losses at once on the CPU, and `Mixup` and `CutMix`, which draw a number on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.tests.waits import NoWaits, WaitedError, no_reads, usual_plugins
from heliograph.tests.kit import dropout_task, random_batches, sgd
from heliograph_recorder import Digests, Recorder
from heliograph_trackers import Profile
from torch import Tensor, nn

Plugins = Callable[[Path], list[Any]]
OTHERS: dict[str, Plugins] = {
    "none": lambda folder: [],
    "norms": lambda folder: [h.GradientNorm(per_module=True)],
    "values": lambda folder: [h.GradientClipping(value=0.5)],
    "times": lambda folder: [h.HandlerTimes(), h.PhaseTimes()],
    "records": lambda folder: [Recorder(folder / "records", losses=True)],
    "digests": lambda folder: [Recorder(folder / "records", digests=Digests(gradients=1, weights=1))],
    "profile": lambda folder: [Profile(folder / "profile", wait=1, warmup=1, active=1)],
    "transform": lambda folder: [h.BatchTransform(lambda batch: (batch[0] * 2, batch[1]))],
    "usual": lambda folder: [*usual_plugins(folder), h.LearningRate("step")],
}


def train(*plugins: Any) -> tuple[NoWaits, h.RunResult]:
    watch = NoWaits(no_reads, range(4, 20))
    trainer = h.Trainer([h.RNGCapture(), h.LogSchedule(epochs=1), *plugins, watch], device="cpu")
    has_rate, accumulates = (
        any(isinstance(each, kind) for each in plugins) for kind in (h.LearningRate, h.GradientAccumulation)
    )
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=5) if has_rate else None
    data = random_batches(24 * (1 + accumulates), 8, inputs=16, outputs=1)
    return watch, trainer.fit(dropout_task(), data, optimizer=sgd(), scheduler=scheduler, epochs=1)


@pytest.mark.parametrize("name", OTHERS)
def test_a_steady_step_reads_no_value(name: str, tmp_path: Path) -> None:
    watch, result = train(*OTHERS[name](tmp_path))
    assert watch.batches >= 16
    assert result.progress.steps == 24


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_nor_does_one_with_several_optimizers(precision: Any) -> None:
    class Pair(h.Task):
        def __init__(self) -> None:
            self.one, self.two = nn.Linear(16, 1), nn.Linear(16, 1)

        def training_step(self, run: h.Run, batch: Any) -> Any:
            yield "one", self.one(batch[0]).square().mean()
            yield "two", self.two(batch[0]).square().mean()

    watch = NoWaits(no_reads, range(4, 20))
    trainer = h.Trainer([h.LogSchedule(epochs=1), h.GradientClipping(1.0), watch], device="cpu", precision=precision)
    data, optimizers = random_batches(24, 8, inputs=16, outputs=1), {"one": sgd(), "two": sgd()}
    trainer.fit(Pair(), data, optimizer=optimizers, epochs=1)
    assert watch.batches == 16


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda loss: loss.item(),
    "bool": lambda loss: bool(torch.isfinite(loss)),
    "float": lambda loss: float(loss.detach()),
    "tolist": lambda loss: loss.tolist(),
    "cpu": lambda loss: loss.cpu(),
    "nonzero": lambda loss: loss.nonzero(),
    "in an operator": lambda loss: torch.add(torch.ones(3), 1.0, alpha=loss.detach()),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", READS)
def test_a_plugin_that_reads_the_loss_is_found(name: str) -> None:
    class Reading(h.Plugin):
        @h.on(h.StepEnd)
        def read(self, run: h.Run, event: h.StepEnd) -> None:
            READS[name](run.loss)

    with pytest.raises(WaitedError, match="value"):
        train(Reading())
