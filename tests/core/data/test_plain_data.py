"""Data that cannot draw are read as they are; all others under their keys."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from heliograph.core.data import dataloader, keyed
from heliograph.core.data.source import Reading
from heliograph.core.data.source_choice import source_of
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

READING = Reading(5, 0, 0, True, lambda done, batches: None)


class Own(Dataset[Any]):
    """The same samples, of which nobody knows whether they draw."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Row(UserDict[str, Any]):
    """Draws when it is collated."""

    def __getitem__(self, name: str) -> float:
        return float(super().__getitem__(name)) + random.random() + torch.rand(1).item()


class Value:
    """Is collated by a function of the user's."""


class Lagging:
    """A sampler that draws when it is asked for the next index, and says that its order goes by seed and epoch."""

    def __len__(self) -> int:
        return 22

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        for index in range(start, 22):
            random.seed(index)
            yield int(random.random() * 22)


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(22.0), torch.arange(22.0) * 2)


NUMBERS: Any = list(range(22))  # torch takes it for a dataset, its annotations do not
DATA: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "list": lambda: [(torch.tensor(float(index)), {"name": str(index)}) for index in range(22)],
    "parts": lambda: ConcatDataset([Subset(tensors(), range(10)), tensors()]),
    "stack": lambda: StackDataset(x=tensors(), y=NUMBERS),
}
HOW: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 4, "shuffle": True},
    "dropped": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "single": {"batch_size": None, "shuffle": True},
}


def texts(batches: Any) -> list[str]:
    return list(map(str, batches))


@pytest.fixture
def unkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every seeding of a batch fail."""

    def refuse(*key: int) -> None:
        raise AssertionError(f"seeded by {key}")

    monkeypatch.setattr(keyed, "seed_all", refuse)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize(("epoch", "batch"), [(0, 0), (1, 3)])
def test_the_batches_are_those_of_a_keyed_source(name: str, how: str, epoch: int, batch: int) -> None:
    place = replace(READING, epoch=epoch, batch=batch)
    keyed = texts(source_of(DataLoader(Own(DATA[name]()), **HOW[how])).open(place))

    assert texts(source_of(DataLoader(DATA[name](), **HOW[how])).open(place)) == keyed
    assert len(keyed) > 1


@pytest.mark.parametrize("name", DATA)
@pytest.mark.usefixtures("unkeyed")
def test_nothing_is_seeded_or_set_aside(name: str, monkeypatch: pytest.MonkeyPatch, training_stream: Any) -> None:
    batches = source_of(DataLoader(DATA[name](), 4, shuffle=True)).open(READING)
    before = training_stream()
    monkeypatch.setattr(dataloader, "isolated", None)

    assert len(list(batches)) == (8 if name == "parts" else 6)
    assert training_stream() == before


def drawing_rows() -> list[Row]:
    return [Row(x=index) for index in range(22)]


def drawing_values() -> list[Value]:
    return [Value() for _ in range(22)]


@pytest.mark.parametrize("data", [drawing_rows, drawing_values])
def test_lists_whose_collation_draws_are_keyed(
    data: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, training_stream: Any
) -> None:
    monkeypatch.setitem(
        default_collate_fn_map, Value, lambda batch, *, collate_fn_map=None: torch.rand(1).item() + random.random()
    )
    before = training_stream()
    whole = texts(source_of(DataLoader(data(), 4)).open(READING))
    assert training_stream() == before
    random.seed(9)
    torch.manual_seed(9)

    assert texts(source_of(DataLoader(data(), 4)).open(READING)) == whole
    assert texts(source_of(DataLoader(data(), 4)).open(replace(READING, batch=2))) == whole[2:]
    assert len(set(whole)) == 6


@pytest.mark.parametrize("data", [drawing_rows, drawing_values])
def test_data_that_become_able_to_draw_are_keyed_from_the_next_epoch_on(
    data: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, training_stream: Any
) -> None:
    monkeypatch.setitem(
        default_collate_fn_map, Value, lambda batch, *, collate_fn_map=None: torch.rand(1).item() + random.random()
    )
    held: Any = [0.0] * 22
    source, fresh = source_of(DataLoader(held, 4)), source_of(DataLoader(data(), 4))
    plain = len(list(source.open(READING)))
    held[:] = data()
    before = training_stream()

    assert plain == 6
    second = replace(READING, epoch=1)
    assert texts(source.open(second)) == texts(fresh.open(second))
    assert training_stream() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_leaves_the_stream_alone(workers: int, training_stream: Any) -> None:
    sampler: Any = Lagging()
    source = source_of(DataLoader(tensors(), 1, sampler=sampler, num_workers=workers))
    before = training_stream()
    for _ in source.open(READING):
        assert training_stream() == before


class OwnLoader(DataLoader[Any]):
    """Could do anything with a batch."""

    def _get_iterator(self) -> Any:
        return (random.random() for _ in super()._get_iterator())


def test_a_loader_of_the_users_class_is_kept_apart(training_stream: Any) -> None:
    source = source_of(OwnLoader(tensors(), 4))
    before = training_stream()

    assert len(list(source.open(READING))) == 6
    assert training_stream() == before
