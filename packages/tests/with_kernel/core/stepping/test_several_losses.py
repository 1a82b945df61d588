"""Tasks that yield several losses, each with an optimizer of its own, as in adversarial training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph import (
    DeviceEngine,
    Every,
    GradientAccumulation,
    GradientClipping,
    LogSchedule,
)
from heliograph.packages.tests.waits import NoWaits, no_waits_on_a_gpu
from heliograph.tests.core.stepping.test_several_losses import data, train

# Equal to a loop written by hand.


# What it emits, counts and measures.


# Losses that are not there for every batch.


# Dropped steps.


# Resumed, and turned back.


# A loop of one's own.


# Refused.


# Several steps of one optimizer per batch, as of the critic of a Wasserstein GAN.


# Other moments for each scheduler.


# On several ranks.


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_no_step_waits_for_the_device(precision: Any) -> None:
    watch, pinned = NoWaits(no_waits_on_a_gpu, range(3, 6)), [(real.pin_memory(),) for (real,) in data(12)]
    plugins = [GradientAccumulation(2), GradientClipping(1.0), LogSchedule(Every(epochs=1)), watch]
    _, result = train(*plugins, engine=DeviceEngine("cuda", precision=precision), train=pinned, epochs=1)
    assert result.progress.steps == 6
    assert watch.batches == 6
