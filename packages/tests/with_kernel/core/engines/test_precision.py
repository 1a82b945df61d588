"""Precision: what is computed in which type, how fp16 scales losses, and what is set and given back."""

from __future__ import annotations

import pytest
import torch
from heliograph import DeviceEngine, Trainer
from heliograph.packages.tests.waits import waits_for_a_gpu
from heliograph.tests.core.engines.test_precision import data, make_task, needs_gpu
from heliograph.tests.kit import adam
from torch import nn

# What is refused.


# What is computed.


# The scale of fp16.


# TensorFloat-32.


# On a GPU.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:.*fused.*")
@pytest.mark.parametrize("fused", [False, True])
def test_fp16_on_a_gpu_skips_counts_and_waits_no_more_than_torch(fused: bool) -> None:
    task, trainer = make_task(), Trainer(device="cuda", precision="fp16")
    result = trainer.fit(task, data(bad=(2,)), optimizer=adam(0.01, fused=fused), epochs=1)
    assert (result.progress.steps, result.progress.skipped_steps) == (5, 1)
    assert all(torch.isfinite(each).all() for each in task.model.parameters())

    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.Adam([parameter], fused=fused)
    engine = DeviceEngine("cuda", precision="fp16")
    engine.set_up(None, {}, {"optimizer": optimizer})
    step, zero_grad = engine.bind_step(optimizer), engine.bind_zero_grad(optimizer)
    engine.backward(parameter.sum())  # the first makes what is made once
    step()
    zero_grad()

    def one_step() -> None:
        engine.backward(parameter.sum())
        engine.unscale(optimizer)
        assert step() is not False
        zero_grad()

    assert waits_for_a_gpu(one_step) == 1
