"""Batches and loaders, looked at from outside."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heliograph.core.data.draws.held_generators import set_epoch
from heliograph.core.data.last_batch import with_last
from heliograph.core.data.order.sizes import batch_size, length_of
from heliograph.core.engines.device import DeviceEngine
from heliograph.core.engines.movers import move
from torch import Tensor


class Point(NamedTuple):
    inputs: Tensor
    name: str


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4, 2)], 4),
        ({"ids": torch.zeros(3, 7)}, 3),
        (({"ids": torch.zeros(2)}, torch.zeros(9)), 2),
        ((torch.tensor(1.0), torch.zeros(9)), 1),
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
    assert batch_size(batch) == size


def test_length_of() -> None:
    assert length_of([1, 2]) == 2
    assert length_of(iter([1, 2])) is None
    assert length_of(None) is None


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]])
def test_with_last(items: list[int]) -> None:
    assert list(with_last(items)) == [(item, item == items[-1]) for item in items]


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
