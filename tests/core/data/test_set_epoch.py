"""Datasets that go by the epoch, in workers that live on, too."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from heliograph import EpochStart, Every, Plugin, Run, ValidationSchedule, on
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

Make = Callable[..., Any]
Read = Callable[..., list[Any]]

HOW: dict[str, dict[str, Any]] = {
    "here": {},
    "a worker": {"num_workers": 1},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def row(*numbers: float) -> Tensor:
    return torch.tensor([*numbers, *[0] * (7 - len(numbers))], dtype=torch.float64)


class Reported(Dataset[Tensor]):
    epoch, level = -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return row(index, self.epoch, self.level)


class Flowing(IterableDataset[Tensor]):
    epoch, level = -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter([row(index, self.epoch, self.level) for index in range(4)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Reported, Flowing])
def test_every_copy_is_reported(kind: Any, how: str, read: Read) -> None:
    batches = read(DataLoader(kind(), 4, **HOW[how]), epochs=[0, 1, 3])

    each = len(batches) // 3
    assert [{sample[1] for sample in batch} for batch in batches] == [
        {epoch} for epoch in (0, 1, 3) for _ in range(each)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Reported, Flowing])
def test_a_resumed_run_is_equal(kind: Any, how: str, fit: Make) -> None:
    """In the second epoch: a worker that began with the first one had its epoch."""

    def make() -> DataLoader[Any]:
        return DataLoader(kind(), 2, **HOW[how])

    steps = len(list(make()))
    whole = fit(make(), epochs=3, cut_at=[steps + 1])
    assert fit(make(), epochs=3, saved=whole.cuts[steps + 1]).is_tail_of(whole)


class Harder(Plugin):
    """Sets an attribute of the dataset, or of the one in it."""

    @on(EpochStart)
    def set(self, run: Run, event: EpochStart) -> None:
        data = run.data.train_loader.dataset
        inner: Any = data.dataset if isinstance(data, Subset) else data
        inner.level = run.progress.epoch // 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [Reported, Flowing, lambda: Subset(Reported(), range(8))])
def test_what_a_plugin_sets_reaches_every_copy(make: Any, how: str, fit: Make) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(make(), 2, **HOW[how])

    steps = len(list(made()))
    here = fit(made(), plugins=[Harder()], epochs=4, cut_at=[2 * steps + 1])
    tail = fit(made(), plugins=[Harder()], epochs=4, saved=here.cuts[2 * steps + 1])

    assert [batch[0][2] for batch in here.batches[::steps]] == [0, 0, 1, 1]
    assert tail.is_tail_of(here)


class Processes(Reported):
    def __getitem__(self, index: int) -> Tensor:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return row(index, info.seed, self.epoch)


def test_workers_that_nobody_changed_live_on(read: Read) -> None:
    batches = read(DataLoader(Processes(), 8, num_workers=1, persistent_workers=True), epochs=[0, 1, 2])

    assert len({sample[1] for batch in batches for sample in batch}) == 1
    assert [batch[0][2] for batch in batches] == [0, 1, 2]


def test_a_validation_reports_no_epoch(fit: Make) -> None:
    """It may share the dataset with the training."""
    data = Reported()
    schedule = ValidationSchedule(Every(steps=1))
    trial = fit(DataLoader(data, 4), validation=DataLoader(data, 4), plugins=[schedule], epochs=3)

    assert [batch[0][1] for batch in trial.batches] == [0, 0, 1, 1, 2, 2]


class Reordered(Reported):
    """Draws when it is given the epoch, by a generator of its own and by a global one."""

    def __init__(self) -> None:
        self.order, self.rng = [*range(8)], random.Random(1)

    def set_epoch(self, epoch: int) -> None:
        self.order = torch.randperm(8).tolist()
        self.rng.shuffle(self.order)

    def __getitem__(self, index: int) -> Tensor:
        return row(self.order[index])


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", HOW)
def test_what_it_draws_then_is_the_same_everywhere(how: str, fit: Make) -> None:
    here = fit(DataLoader(Reordered(), 4), epochs=3, cut_at=[5])
    there = fit(DataLoader(Reordered(), 4, **HOW[how]), epochs=3)
    tail = fit(DataLoader(Reordered(), 4, **HOW[how]), epochs=3, saved=here.cuts[5])

    assert there.batches == here.batches
    assert there.losses == here.losses
    assert tail.is_tail_of(here)
    assert len({str(here.batches[place : place + 2]) for place in (0, 2, 4)}) == 3
