"""Precision: what is computed in which type, how fp16 scales losses, and what is set and given back."""

from __future__ import annotations

import pytest
import torch
from heliograph import DeviceEngine, Supervised, Trainer
from heliograph.packages.tests.waits import waits_for_a_gpu
from heliograph.tests.kit import Batch, adam, random_batches
from torch import Tensor, nn

HUGE = 1e38  # overflows in fp16, and in fp32 once it is scaled


def data(count: int = 6, bad: tuple[int, ...] = ()) -> list[Batch]:
    pairs = enumerate(random_batches(count, 3))
    return [(inputs * (HUGE if index in bad else 1), targets) for index, (inputs, targets) in pairs]


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose gradients fp16 holds with the scale that a run begins with."""
    return nn.functional.mse_loss(outputs, targets) / 64


def make_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), loss_fn)


# What is refused.


# What is computed.


# The scale of fp16.


# TensorFloat-32.


# On a GPU.

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


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
