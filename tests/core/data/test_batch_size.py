"""find_batch_size halves the batch after out-of-memory errors, and only after those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph import ExceptionPassThrough, RankFailed, Supervised, Trainer, find_batch_size
from torch import Tensor, nn

OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    RankFailed(1, "torch.OutOfMemoryError", "CUDA out of memory", "in train, step 3"),
]


@pytest.mark.parametrize("error", OUT, ids=lambda error: type(error).__name__)
def test_it_halves_the_batch_until_it_fits(error: BaseException) -> None:
    tried: list[int] = []

    def attempt(size: int) -> str:
        tried.append(size)
        if size > 16:
            raise error
        return "fits"

    assert find_batch_size(attempt, 64) == (16, "fits")
    assert tried == [64, 32, 16]


def test_any_other_error_leaves_at_once() -> None:
    def attempt(size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        find_batch_size(attempt, 64)


def test_it_gives_up_below_the_smallest() -> None:
    tried: list[int] = []

    def attempt(size: int) -> None:
        tried.append(size)
        raise MemoryError

    with pytest.raises(MemoryError):
        find_batch_size(attempt, 64, smallest=20)
    assert tried == [64, 32]


def test_it_goes_with_a_trainer_and_its_wrapped_errors() -> None:
    class Hungry(Supervised):
        def training_step(self, run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            if len(batch[0]) > 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(run, batch)

    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    trainer = Trainer([ExceptionPassThrough()], device="cpu")

    def attempt(size: int) -> int:
        task = Hungry(nn.Linear(4, 2), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        return trainer.fit(task, data, loader_params={"batch_size": size}, optimizer=optimizer, epochs=1).progress.steps

    assert find_batch_size(attempt, 32) == (8, 4)


@pytest.mark.parametrize(("largest", "smallest"), [(0, 1), (8, 0), (4, 8), (True, 1), (2.5, 1)])
def test_sizes_that_are_none_are_refused(largest: Any, smallest: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1|the other way round"):
        find_batch_size(lambda size: size, largest, smallest=smallest)
