"""Everything that objects hold is put back into the very same objects."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.rehearsal.objects import KeptObjects
from heliograph.tests.messages import assert_each
from torch import nn


class Slotted:
    __slots__ = ("one", "two")
    one: int
    two: int


class Thing:
    def __init__(self) -> None:
        self.numbers = [1, 2, 3]
        self.names = OrderedDict(a=1, b=2)
        self.plain: dict[str, Any] = {"x": {"y": 1}}
        self.row = deque([1, 2], maxlen=3)
        self.kinds = {1, 2}
        self.slotted = Slotted()
        self.slotted.one = 5
        self.array = np.arange(4.0)
        self.generator = np.random.default_rng(0)
        self.python = random.Random(3)
        self.torch = torch.Generator().manual_seed(4)
        self.model: Any = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.counted = counted
        self.bound = partial(self.numbers.append, 9)


def test_containers_attributes_and_closures_are_put_back_in_place() -> None:
    thing = Thing()
    numbers, plain = thing.numbers, thing.plain
    with KeptObjects([thing]):
        thing.numbers.append(4)
        thing.bound()
        thing.names["c"] = thing.names.pop("a")
        thing.plain["x"]["y"] = 2
        thing.plain["z"] = thing.numbers
        thing.row.extend([7, 8])
        thing.kinds.add(9)
        del thing.slotted.one
        thing.slotted.two = 6
        thing.array[1] = 50.0
        thing.extra = 1  # type: ignore[attr-defined]
        thing.numbers = []
        assert thing.counted() == 1
    assert thing.numbers is numbers
    assert numbers == [1, 2, 3]
    assert list(thing.names.items()) == [("a", 1), ("b", 2)]
    assert thing.plain is plain
    assert plain == {"x": {"y": 1}}
    assert list(thing.row) == [1, 2]
    assert thing.row.maxlen == 3
    assert thing.kinds == {1, 2}
    assert thing.slotted.one == 5
    assert not hasattr(thing.slotted, "two")
    assert thing.array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not hasattr(thing, "extra")
    assert thing.counted() == 1


def test_weights_gradients_modes_and_the_state_of_an_optimizer_are_put_back() -> None:
    thing = Thing()
    first: Any = thing.model[0]
    weight, bits = first.weight, first.weight.detach().clone()
    first.weight.grad = torch.ones(2, 3)
    gradient = first.weight.grad
    with KeptObjects([thing]):
        thing.model(torch.randn(5, 3)).sum().backward()
        thing.optimizer.step()
        thing.optimizer.param_groups[0]["lr"] = 0.5
        thing.model.eval()
        first.weight.requires_grad_(False)
        thing.model[0] = nn.Linear(3, 2)
        thing.model.double()
    assert thing.model[0] is first
    assert first.weight is weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, bits)
    assert weight.requires_grad
    assert weight.grad is gradient
    assert torch.equal(gradient, torch.ones(2, 3))
    assert thing.model.training
    assert thing.model[1].running_mean.tolist() == [0.0, 0.0]
    assert not thing.optimizer.state
    assert thing.optimizer.param_groups[0]["lr"] == 0.1


def test_generators_are_put_back_after_an_exception_too() -> None:
    thing = Thing()
    torch.manual_seed(1)
    expected = [torch.Generator().manual_seed(4).initial_seed(), torch.rand(2).tolist()]
    torch.manual_seed(1)
    own = random.Random(3).random(), np.random.default_rng(0).random(), torch.rand(1, generator=_seeded(4)).item()
    with pytest.raises(KeyError), KeptObjects([thing]):
        thing.python.random()
        thing.generator.random()
        torch.rand(3, generator=thing.torch)
        torch.rand(7)
        raise KeyError
    drawn = thing.python.random(), thing.generator.random(), torch.rand(1, generator=thing.torch).item()
    assert drawn == own
    assert [thing.torch.initial_seed(), torch.rand(2).tolist()] == expected


def test_large_tensors_of_the_data_are_watched_and_small_ones_put_back() -> None:
    small, large = torch.zeros(4), torch.zeros(2**19)
    with KeptObjects([], [{"small": small, "large": large}]) as backup:
        small.add_(1)
        large.add_(1)
    assert small.sum() == 0
    assert_each(backup.changed, ("tensor of the data", "[524288]", "modified"))


def test_iterators_are_named() -> None:
    holder = {"stream": (number for number in range(3)), "it": iter([1])}
    with KeptObjects([holder]) as backup:
        pass
    assert set(backup.iterators) == {"generator", "list_iterator"}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
