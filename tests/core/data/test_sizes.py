"""Batches and loaders, looked at from outside."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heliograph.core.data.keyed import set_epoch
from heliograph.core.data.last_batch import with_last
from heliograph.core.data.sizes import SampleCounter, count_samples, length_of, size_counter
from heliograph.core.engines.device import DeviceEngine
from heliograph.core.engines.movers import move
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence


class Point(NamedTuple):
    inputs: Tensor
    name: str


@dataclass
class Row:
    x: Any
    y: Any


@dataclass(slots=True)
class Slotted:
    shard: str
    x: Tensor


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4, 2)], 4),
        ([(torch.zeros(4), torch.tensor(1.0)), (torch.zeros(4), torch.tensor(0.0))], 2),
        ([{"x": torch.zeros(4), "y": 1}] * 3, 3),
        ({"ids": torch.zeros(3, 7)}, 3),
        (({"ids": torch.zeros(2)}, torch.zeros(9)), 2),
        ((torch.tensor(1.0), torch.zeros(9)), 9),
        ({"step": torch.tensor(1), "shard": "s-01", "x": torch.zeros(4, 2), "y": torch.zeros(4)}, 4),
        ((3, "s-01", torch.zeros(5, 2)), 5),
        ((torch.zeros(4, 2), ["a"] * 4, [7] * 4), 4),
        (UserDict(text=["a", "b"], ids=torch.zeros(2, 9)), 2),
        (Row(torch.zeros(5, 2), torch.zeros(5)), 5),
        (Row(None, (torch.zeros(5, 2), np.zeros(5))), 5),
        (Slotted("s-01", torch.zeros(6, 2)), 6),
        (SimpleNamespace(shard=3, nested={"x": [torch.zeros(2, 2)]}), 2),
        (SimpleNamespace(x=torch.zeros(30, 2), edges=torch.zeros(2, 90), num_graphs=3), 3),
        ((SimpleNamespace(x=torch.zeros(30, 2), batch_size=4), torch.zeros(4)), 4),
        (pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2), torch.zeros(1, 2)]), 3),
        ((pack_sequence([torch.zeros(5), torch.zeros(3)]), torch.zeros(2)), 2),
        (torch.zeros(4, 2).to_sparse(), 4),
        (torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged), 2),
        ({"x": torch.zeros(4, 3), "y": torch.zeros(4), "class_weights": torch.ones(7)}, 4),
        ({"text": ["a", "b", "c"], "label": [0, 1, 1]}, 3),
        ({"step": 1}, 1),
        (["a", "b", "c"], 3),
        ([1, 2], 2),
        ((1.0, 2.0, 3.0), 3),
        ([np.float32(1), np.float32(2)], 2),
        ([b"a", b"b"], 2),
        (1.0, 1),
        ("text", 1),
        (b"bytes", 1),
        (np.zeros((3, 2)), 3),
        (np.zeros(()), 1),
        ({"ids": np.zeros((3, 7))}, 3),
        ([], 0),
        (object(), 1),
        (Point(torch.zeros(6, 1), "p"), 6),
    ],
)
def test_batch_size(batch: Any, size: int) -> None:
    assert count_samples(batch) == size


AMBIGUOUS = [
    ({"x": torch.zeros(4, 3), "y": torch.zeros(4), "class_weights": torch.ones(7)}, "class_weights: [7]"),
    ((torch.zeros(3, 2), torch.zeros(9)), "[3, 2], [9]"),
    (Row(torch.zeros(3, 2), {"boxes": torch.zeros(8, 4)}), "Row(x: [3, 2], y: dict(boxes: [8, 4]))"),
    ({"text": ["a", "b"], "id": 3}, "text: list(str, str), id: int"),
    (torch.tensor(1.0), "[]"),
]


@pytest.mark.parametrize(("batch", "structure"), AMBIGUOUS)
def test_an_ambiguous_batch_is_warned_of_once(batch: Any, structure: str) -> None:
    warnings: list[str] = []
    count = SampleCounter(warnings.append).count
    assert count(batch) == count(batch) == count_samples(batch)
    assert len(warnings) == 1
    assert structure in warnings[0]
    assert "batch_size(self, batch)" in warnings[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda size: (torch.zeros(size, 2), torch.zeros(size)),
        lambda size: [torch.zeros(size, 2), torch.zeros(size), "text"],
        lambda size: {"step": torch.tensor(1), "x": torch.zeros(size, 2), "mask": torch.zeros(size)},
        lambda size: ({"ids": torch.zeros(size, 2)}, torch.zeros(size)),
        lambda size: Row(torch.zeros(size, 2), [np.zeros(size)]),
        lambda size: Slotted("s-01", torch.zeros(size, 2)),
        lambda size: (SimpleNamespace(num_graphs=size, x=torch.zeros(9, 1)), torch.zeros(size)),
    ],
)
def test_every_batch_is_counted_by_its_own_tensors(make: Callable[[int], Any]) -> None:
    warnings: list[str] = []
    count = SampleCounter(warnings.append).count
    assert [count(make(size)) for size in (4, 4, 2)] == [4, 4, 2]
    assert [count({"other": torch.zeros(size)}) for size in (3, 1)] == [3, 1]
    assert not warnings


def test_a_batch_of_streams_has_the_samples_of_all() -> None:
    count = SampleCounter(None, [["a", "b"]]).count
    parts = [{"x": torch.zeros(3)}, Row(torch.zeros(4, 2), torch.zeros(4)), {"x": torch.zeros(2)}]
    assert count({"a": parts[0], "b": parts[1]}) == 7
    assert count({"a": parts[0], "b": None}) == 3
    assert count(parts[2]) == 2


def test_length_of() -> None:
    assert length_of([1, 2]) == 2
    assert length_of(iter([1, 2])) is None
    assert length_of(None) is None


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]])
def test_with_last(items: list[int]) -> None:
    assert list(with_last(items)) == [(item, item == items[-1]) for item in items]


@pytest.mark.parametrize("size", [None, torch.tensor(4), 4.0, -1])
def test_the_batch_size_of_a_task_is_a_number(size: Any) -> None:
    task = SimpleNamespace(batch_size=lambda batch: size)
    with pytest.raises(TypeError, match=re.escape(f"batch_size(batch) returned {size!r}")):
        size_counter(task, count_samples)([])
    assert size_counter(SimpleNamespace(batch_size=lambda batch: np.int64(4)), count_samples)([]) == 4


def test_set_epoch_reaches_loader_and_samplers() -> None:
    class Reported:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Loader:
        sampler, batch_sampler = Reported(), Reported()

    set_epoch(Loader(), 4)
    assert (Loader.sampler.epoch, Loader.batch_sampler.epoch) == (4, 4)


def test_move_keeps_the_kinds_of_containers() -> None:
    batch = {"a": [torch.zeros(1), (torch.ones(1), "text")], "b": Point(torch.zeros(2), "p")}
    moved = move(batch, torch.device("meta"))
    assert isinstance(moved["b"], Point)
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == moved["b"].inputs.device.type == "meta"
    assert moved["a"][1][1] == "text"


def test_feed_moves_where_the_device_is_another() -> None:
    engine = DeviceEngine("meta")
    assert [batch.device.type for batch in engine.feed(iter([torch.zeros(1)]))] == ["meta"]
    assert list(DeviceEngine("cpu").feed(iter([1, 2]))) == [1, 2]


def test_contexts_of_one_device_do_nothing() -> None:
    engine = DeviceEngine("cpu")
    with engine.autocast(), engine.no_sync():
        assert (engine.rank, engine.world_size, engine.is_main) == (0, 1, True)
