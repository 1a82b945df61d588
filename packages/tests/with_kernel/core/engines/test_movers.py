"""Batches on their way to a device: whatever they are made of. The device `meta` is always there to move to."""

from __future__ import annotations

import pytest
import torch
from heliograph.core.engines import movers
from heliograph.core.engines.movers import LARGE, move
from heliograph.packages.tests.waits import keep_a_gpu_busy, no_waits_on_a_gpu

# Beside the computation of a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_large_batch_reaches_a_gpu_that_is_busy_and_keeps_its_memory() -> None:
    """The memory of a batch that was dropped is still in use when the next one is copied."""
    device = torch.device("cuda", torch.cuda.current_device())
    sums = []
    for number in range(20):
        batch = move(torch.full((LARGE,), float(number)).pin_memory(), device)
        keep_a_gpu_busy(0.005)
        sums.append(batch.amin() + batch.amax())
    assert torch.stack(sums).tolist() == [2.0 * number for number in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_copy_of_a_large_batch_is_done_while_the_computation_is_not() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pinned = torch.ones(LARGE).pin_memory()
    copies = movers.CopyStream(device)
    copies.copy(pinned)  # the first takes memory, which may wait for the device
    torch.cuda.synchronize(device)
    keep_a_gpu_busy(1.0)
    copies.copy(pinned)
    copies._stream.synchronize()
    assert not torch.cuda.current_stream(device).query()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_move_to_a_gpu_without_a_wait_and_back_with_one() -> None:
    batch = (torch.arange(1 << 20).pin_memory(), {"targets": torch.ones(3).pin_memory()})
    with no_waits_on_a_gpu():
        moved = move(batch, torch.device("cuda"))
    assert moved[1]["targets"].device.type == "cuda"
    assert torch.equal(move(moved, torch.device("cpu"))[0], batch[0])
