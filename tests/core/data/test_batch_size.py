"""find_executable_batch_size halves the batch after out-of-memory errors, and only after those."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    EarlyStopping,
    Every,
    ExceptionPassThrough,
    GradientAccumulation,
    LearningRate,
    LogSchedule,
    Phases,
    RankFailed,
    RunResult,
    Supervised,
    Trainer,
    ValidationSchedule,
    tuning,
    warmup_linear,
)
from heliograph.core.data.batch_size import SavedSizeFirst
from heliograph.tests.kit import fit, random_batches, saving
from heliograph.tuning import find_executable_batch_size
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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

    assert find_executable_batch_size(attempt, 64) == (16, "fits")
    assert tried == [64, 32, 16]


def test_any_other_error_leaves_at_once() -> None:
    def attempt(size: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        find_executable_batch_size(attempt, 64)


def test_it_gives_up_below_the_smallest() -> None:
    tried: list[int] = []

    def attempt(size: int) -> None:
        tried.append(size)
        raise MemoryError

    with pytest.raises(MemoryError):
        find_executable_batch_size(attempt, 64, smallest=20)
    assert tried == [64, 32]


def test_it_goes_with_a_trainer_and_its_wrapped_errors() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    trainer = Trainer([ExceptionPassThrough()], device="cpu")

    def attempt(size: int) -> int:
        task = Hungry(nn.Linear(4, 2), nn.functional.mse_loss)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1)
        return trainer.fit(task, data, loader_params={"batch_size": size}, optimizer=optimizer, epochs=1).progress.steps

    assert find_executable_batch_size(attempt, 32) == (8, 4)


class Hungry(Supervised):
    """Does not fit into memory with batches of more than 8."""

    most = 8

    def training_step(self, run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(run, batch)


def test_a_run_that_is_resumed_begins_with_the_size_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.utils.data.TensorDataset(*random_batches(1, 32)[0])
    tried: list[int] = []

    def attempt(size: int, epochs: int) -> RunResult:
        tried.append(size)
        plugins = [*saving(tmp_path, Every(steps=1), resume="auto"), GradientAccumulation(32 // size)]
        task = Hungry(nn.Linear(4, 2), nn.functional.mse_loss)
        return fit(*plugins, task=task, train=data, loader_params={"batch_size": size}, epochs=epochs)

    assert find_executable_batch_size(partial(attempt, epochs=1), 32)[0] == 8
    assert tried == [32, 16, 8]
    tried.clear()
    size, result = find_executable_batch_size(partial(attempt, epochs=2), 32)
    assert (size, tried) == (8, [32, 8])
    assert (result.status, result.resume.reasons if result.resume else None) == ("completed", ())
    tried.clear()
    monkeypatch.setattr(Hungry, "most", 16)
    size, _ = find_executable_batch_size(
        partial(attempt, epochs=3), 32, smallest=16
    )  # where the former size may not be tried
    assert (size, tried) == (16, [32, 16])


def test_where_what_is_tried_is_not_the_batch_size_the_ratio_counts(tmp_path: Path) -> None:
    data, tried = torch.utils.data.TensorDataset(*random_batches(1, 32)[0]), list[int]()

    def attempt(size: int, epochs: int) -> RunResult:
        tried.append(size)
        task = Hungry(nn.Linear(4, 2), nn.functional.mse_loss)
        plugins = saving(tmp_path, Every(steps=1), resume="auto")
        return fit(*plugins, task=task, train=data, loader_params={"batch_size": size // 2}, epochs=epochs)

    assert find_executable_batch_size(partial(attempt, epochs=1), 64)[0] == 16
    tried.clear()
    assert find_executable_batch_size(partial(attempt, epochs=2), 64)[0] == 16
    assert tried == [64, 16]


def test_a_rank_tries_what_another_one_found_in_its_checkpoint() -> None:
    tried: list[int] = []

    def attempt(size: int) -> str:
        tried.append(size)
        if size > 8:
            kind = f"{SavedSizeFirst.__module__}.SavedSizeFirst"
            raise RankFailed(1, kind, str(SavedSizeFirst(8)), "in train, step 0")
        return "resumed"

    assert find_executable_batch_size(attempt, 64) == (8, "resumed")
    assert tried == [64, 8]


@pytest.mark.parametrize(("largest", "smallest"), [(0, 1), (8, 0), (4, 8), (True, 1), (2.5, 1)])
def test_sizes_that_are_none_are_refused(largest: Any, smallest: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1|other way"):
        find_executable_batch_size(lambda size: size, largest, smallest=smallest)


def test_every_attempt_begins_with_the_same_random_numbers() -> None:
    drawn: list[float] = []

    def attempt(size: int) -> None:
        drawn.append(torch.rand(()).item())
        if size > 4:
            raise MemoryError

    assert find_executable_batch_size(attempt, 16)[0] == 4
    assert len(drawn) == 3
    assert len(set(drawn)) == 1


def test_a_trainer_finds_it_and_leaves_everything_as_it_was() -> None:
    """With the plugins, also where a validation needs the memory."""
    model = nn.Linear(4, 2)
    task = Hungry(model, nn.functional.mse_loss)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
    before, draws = model.weight.detach().clone(), torch.get_rng_state()
    trainer = Trainer([GradientAccumulation(2)], device="cpu")
    size = tuning.find_batch_size(trainer, task, data, largest=64, optimizer=torch.optim.SGD, epochs=1)
    assert size == 8
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), draws)
    with pytest.raises(RuntimeError, match="out of memory"):
        tuning.find_batch_size(trainer, task, data, largest=64, smallest=16, optimizer=torch.optim.SGD, epochs=1)


@pytest.mark.parametrize("plugins", [[], [LearningRate("step"), LogSchedule(fraction=0.5), EarlyStopping()]])
@pytest.mark.parametrize("length", [{}, {"epochs": None, "steps": None}])
def test_a_trainer_finds_it_without_an_end_of_the_run(plugins: list[Any], length: dict[str, Any]) -> None:
    data = TensorDataset(torch.randn(10, 4), torch.randn(10, 2))
    options: Any = {"largest": 8, "optimizer": torch.optim.SGD, "validation": data, **length}
    if plugins:
        options["scheduler"] = warmup_linear(0.1)
    task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    trainer = Trainer([*plugins, ValidationSchedule(epochs=1)], device="cpu")
    for train in (data, Phases(data, data)):
        assert tuning.find_batch_size(trainer, task, train, **options) == 8


def test_a_trainer_tries_what_it_returns() -> None:
    task = Supervised(nn.Linear(4, 2), nn.functional.mse_loss)
    data = TensorDataset(torch.randn(10, 4), torch.randn(10, 2))
    options: Any = {"largest": 4096, "optimizer": torch.optim.SGD, "epochs": 1}
    trainer = Trainer(device="cpu")
    assert tuning.find_batch_size(trainer, task, data, **options) == 10
    with pytest.raises(TypeError, match="DataLoader"):
        tuning.find_batch_size(trainer, task, DataLoader(data, batch_size=4), validation=data, **options)
    with pytest.raises(ValueError, match="least 1; got 'x'"):
        tuning.find_batch_size(trainer, task, data, **{**options, "largest": "x"})
