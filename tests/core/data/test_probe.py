"""The probe finds state that a dataset hides from the keys, raises no false alarm, and changes nothing."""

from __future__ import annotations

import os
import random
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data.probe import same
from heliograph.core.data.sources import MapSource, source_of
from heliograph.core.data.training_data import TrainingData
from torch import Tensor
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


def found(data: Any, **how: Any) -> list[str]:
    probed = TrainingData([DataLoader(data, 4, **how)])
    probed.key(5)
    return probed.probe()


@pytest.mark.parametrize("kind", HIDING)
def test_hidden_state_is_found(kind: str) -> None:
    assert found(By(HIDING[kind])) == [
        "By loads the same batch differently each time: it holds state that no key reaches (a counter, a hidden "
        "generator, the clock, os.urandom)"
    ]


@pytest.mark.parametrize("kind", PURE)
@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"num_workers": 2}, {"collate_fn": list}])
def test_there_is_no_false_alarm(kind: str, how: dict[str, Any]) -> None:
    assert found(By(PURE[kind]), **how) == []


@dataclass
class Sample:
    image: Tensor
    name: str


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


Pair = namedtuple("Pair", "one two")  # the untyped kind is looked into as well


MADE: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda numbers: Sample(numbers, "a"),
    "object": lambda numbers: Plain(numbers),
    "named tuple": lambda numbers: Pair(numbers, [numbers.numpy()]),
    "dict": lambda numbers: {"a": 1, "b": (numbers[0].item(), np.float32(numbers[1].item()))},
    "bool": lambda numbers: numbers > 0,
    "transposed bfloat16": lambda numbers: numbers.reshape(2, 3).to(torch.bfloat16).t(),
    "sparse": lambda numbers: numbers.to_sparse(),
    "object array": lambda numbers: np.array([numbers[0].item(), "text", None], dtype=object),
    "slice": lambda numbers: slice(numbers[0].item(), None),
}


@pytest.mark.parametrize("kind", MADE)
def test_batches_of_any_kind_are_compared(kind: str) -> None:
    numbers = torch.linspace(-1, 1, 6)
    one, twin, other = (MADE[kind](each.clone()) for each in (numbers, numbers, numbers.flip(0)))

    assert same(one, twin)
    assert not same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(1), 0.0),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.zeros(2), [0.0, 0.0]),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        ("a", b"a"),
        (Plain(torch.zeros(2)), Plain(torch.ones(2))),
        (Sample(torch.zeros(2), "a"), Plain(torch.zeros(2))),
    ],
)
def test_what_is_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)


@pytest.mark.parametrize(
    ("holds", "error"), [(threading.Lock, "TypeError: cannot pickle"), (random.SystemRandom, "NotImplementedError: ")]
)
def test_a_dataset_that_cannot_be_copied_is_said(holds: Callable[[], Any], error: str) -> None:
    data = By(PURE["index"])
    data.lazy = holds()
    (sentence,) = found(data)

    assert sentence.startswith(f"By cannot be copied ({error}")
    assert sentence.endswith("), so hidden state in it was not looked for")


class Order(Sampler[int]):
    """Draws from a generator of its own, and counts."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.times = 0

    def __iter__(self) -> Any:
        self.times += 1
        return iter(torch.randperm(8, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 8


def test_nothing_is_changed(training_stream: Any) -> None:
    data, order = By(count), Order()
    own = np.random.default_rng(4)
    loader: DataLoader[Any] = DataLoader(data, 4, sampler=order, collate_fn=lambda samples: [*samples, own.random()])
    states = data.own.bit_generator.state, data.torch.get_state().tolist(), order.generator.get_state().tolist()
    before = training_stream()
    probed = TrainingData([loader])
    assert len(probed.probe()) == 1

    assert (data.count, order.times) == (0, 0)
    assert states == (
        data.own.bit_generator.state,
        data.torch.get_state().tolist(),
        order.generator.get_state().tolist(),
    )
    assert training_stream() == before


def test_amid_an_epoch_it_does_no_harm(drawing: Make, reading: Any) -> None:
    whole = [batch.tolist() for batch in reading(source_of(DataLoader(drawing(), 4, shuffle=True)), 3)]
    probed = TrainingData([DataLoader(drawing(), 4, shuffle=True)])
    assert isinstance(probed.source, MapSource)
    batches = []
    for batch in reading(probed.source, 3):
        batches.append(batch.tolist())
        assert probed.probe() == []

    assert batches == whole


def test_loaders_that_are_read_otherwise_are_not_probed(flowing: Make) -> None:
    loaders: list[Any] = [DataLoader(flowing(), 4), [torch.zeros(2)], iter(())]
    for loader in loaders:
        assert TrainingData([loader]).probe() == []


def test_every_phase_is_probed() -> None:
    loaders = [DataLoader(By(count)), DataLoader(TensorDataset(torch.zeros(3))), DataLoader(By(HIDING["urandom"]))]
    data = TrainingData(loaders)

    assert len(data.probe()) == 2
    assert data.guarantee()[0] == "order-exact"


def test_a_dataset_of_whole_batches_is_probed() -> None:
    assert len(TrainingData([DataLoader(By(count), batch_size=None)]).probe()) == 1
    assert TrainingData([DataLoader(By(PURE["index"]), batch_size=None)]).probe() == []


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


class Unseekable:
    """Promises an order by (seed, epoch), and does not keep that."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 8

    def indices(self, seed: int, epoch: int, start: int) -> Any:
        self.times += 1
        return iter([(each + self.times) % 8 for each in range(start, 8)])


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ({"batch_size": 4, "sampler": Counting()}, "Counting"),
        ({"batch_size": None, "sampler": Counting()}, "Counting"),
        ({"batch_sampler": CountingBatches()}, "CountingBatches"),
        ({"batch_size": 4, "sampler": Unseekable()}, "Unseekable"),
    ],
)
def test_a_sampler_with_a_state_is_accused_and_not_the_dataset(how: dict[str, Any], name: str) -> None:
    (sentence,) = TrainingData([DataLoader(By(PURE["index"]), **how)]).probe()

    assert sentence.startswith(f"{name} gives another order each time it is asked: it holds state that no key reaches")


def test_a_sampler_and_a_dataset_with_a_state_are_both_accused() -> None:
    sentences = TrainingData([DataLoader(By(count), 4, sampler=Counting())]).probe()

    assert [sentence.split(" ", 1)[0] for sentence in sentences] == ["Counting", "By"]


def test_an_epoch_without_batches_shows_nothing() -> None:
    assert TrainingData([DataLoader(By(count), 9, drop_last=True)]).probe() == []
