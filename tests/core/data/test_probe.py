"""The probe finds state that a dataset hides from the keys, raises no false alarm, and changes nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data.training_data import TrainingData
from heliograph.events import Progress
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

Make = Callable[..., Any]


class By(Dataset[Any]):
    """A dataset of a function."""

    def __init__(self, load: Callable[[Any, int], Any]) -> None:
        self.load = load
        self.count = 0
        self.lazy: Any = None
        self.own = np.random.default_rng(3)
        self.torch = torch.Generator()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.load(self, index)


SYSTEM = random.SystemRandom()


def count(data: Any, index: int) -> int:
    data.count += 1
    return int(data.count)


def lazily(data: Any, index: int) -> float:
    if data.lazy is None:
        data.lazy = np.random.default_rng()
    return float(data.lazy.random())


HIDING: dict[str, Callable[[Any, int], Any]] = {
    "counter": count,
    "urandom": lambda data, index: int.from_bytes(os.urandom(4), "little"),
    "a Random of no seed": lambda data, index: random.Random().random(),
    "the system's generator": lambda data, index: SYSTEM.random(),
    "torch.Generator().seed()": lambda data, index: torch.Generator().seed() % 2**60,
    "a generator made when it is first used": lazily,
}
PURE: dict[str, Callable[[Any, int], Any]] = {
    "index": lambda data, index: index,
    "global generators": lambda data, index: random.random() + np.random.rand() + torch.rand(1).item(),
    "seedless": lambda data, index: np.random.default_rng().random(),
    "generators that it holds": lambda data, index: data.own.random() + torch.rand(1, generator=data.torch).item(),
    "a new tensor": lambda data, index: {"x": torch.full((3,), float("nan")), "y": [np.full(2, index), "text"]},
}


LAZY = "a generator made when it is first used"
LOADS = (
    "By loads the same batch differently each time: it has state that cannot be seeded (a counter, a cache of "
    "drawn values, a hidden generator, the clock, os.urandom)"
)


def remembered(data: Any, index: int) -> float:
    data.lazy = data.lazy or random.random()
    return float(data.lazy)


def opened(data: TrainingData) -> Iterator[Any]:
    return data.open(Progress(), lambda done, batches: None)


def found(data: Any, **how: Any) -> list[str]:
    probed = TrainingData([DataLoader(data, **{"batch_size": 4, **how})])
    probed.key(5)
    list(opened(probed))
    probed.close()
    return [text for kinds in probed.resume_facts().untracked.values() for text in kinds.split("; ")]


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("workers", [0, 2])
def test_hidden_state_is_found(kind: str, workers: int) -> None:
    (*_, sentence) = [*found(By(HIDING[kind]), num_workers=workers)] or [""]

    assert sentence == ("" if kind == LAZY else LOADS)


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"num_workers": 2}, {"collate_fn": list}])
def test_there_is_no_false_alarm(kind: str, how: dict[str, Any]) -> None:
    assert found(By(PURE[kind]), **how) == []


def test_the_training_s_stream_is_left_alone(training_stream: Any) -> None:
    before = training_stream()
    assert found(By(PURE["generators that it holds"])) == []
    assert training_stream() == before


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"num_workers": 1}])
def test_what_is_read_is_the_same_with_it(drawing: Make, how: dict[str, Any]) -> None:
    def batches(probe: bool) -> list[Any]:
        data = TrainingData([DataLoader(drawing(), 4, **how)])
        data.key(5, probe=probe)
        return [batch.tolist() for batch in opened(data)]

    assert batches(True) == batches(False)


def test_loaders_that_are_read_otherwise_are_not_probed(flowing: Make) -> None:
    loaders: list[Any] = [DataLoader(flowing(), 4), [torch.zeros(2)], [1]]
    for loader in loaders:
        data = TrainingData([loader])
        data.key(5)
        list(opened(data))
        assert data.resume_facts().untracked == {}


def test_every_phase_is_probed() -> None:
    loaders = [DataLoader(By(count)), DataLoader(TensorDataset(torch.zeros(3))), DataLoader(By(HIDING["urandom"]))]
    data = TrainingData(loaders)
    data.key(5)
    for data.phase in range(3):
        list(opened(data))
        assert data.resume_facts().untracked == {"train loader": LOADS}

    assert data.state_dict(Progress())["facts"]["hidden"] == [LOADS]


def test_a_dataset_of_whole_batches_is_probed() -> None:
    assert found(By(count), batch_size=None) == [LOADS]
    assert found(By(remembered), batch_size=None) == [LOADS]
    assert found(By(PURE["index"]), batch_size=None) == []


@pytest.mark.parametrize("kind", [*HIDING, "remembered"])
def test_samples_under_keys_of_their_own(kind: str) -> None:
    data = TrainingData([DataLoader(By(HIDING.get(kind, remembered)), 4)], per_sample=True)
    data.key(5)
    list(opened(data))

    reasons = data.resume_facts().sentences
    assert [LOADS in reason for reason in reasons] == [True] * (kind != LAZY)


def test_of_counting_alone_nothing_is_said() -> None:
    """A count that shows nowhere, of samples that draw."""

    def load(data: Any, index: int) -> float:
        data.count += 1
        return float(torch.rand(()))

    assert found(By(load)) == []


class Counting(Sampler[int]):
    """Gives another order whenever it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.times)).tolist())

    def __len__(self) -> int:
        return 8


class CountingBatches:
    """The same, of whole batches; the first one never differs."""

    def __init__(self) -> None:
        self.times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return iter([[0, 1], [self.times, self.times + 1]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("how", [{"sampler": Counting()}, {"batch_size": 1, "batch_sampler": CountingBatches()}])
def test_a_sampler_without_indices_is_not_accused(how: dict[str, Any]) -> None:
    assert found(By(count), **how) == [LOADS]
    assert found(By(PURE["index"]), **how) == []


def test_an_epoch_without_batches_shows_nothing() -> None:
    assert found(By(count), batch_size=9, drop_last=True) == []
