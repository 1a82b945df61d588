"""Values of any kind are compared to the last bit."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.objects.equality import same
from torch import Tensor


@dataclass
class Sample:
    image: Tensor
    name: str


@dataclass(slots=True)
class SlottedSample:
    image: Tensor


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
        ([1, 2], (1, 2)),
        (1, 1.0),
        (0.0, -0.0),
        ("a", b"a"),
        (Plain(torch.zeros(2)), Plain(torch.ones(2))),
        (Sample(torch.zeros(2), "a"), Plain(torch.zeros(2))),
    ],
)
def test_what_is_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)


class Table:
    """Compares by its elements, as tables of pandas do."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __eq__(self, other: object) -> Any:
        return np.array(self.numbers) == 1

    __hash__ = None  # type: ignore[assignment]  # as pandas has it

    def equals(self, other: Any) -> bool:
        return bool(self.numbers == other.numbers)


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def test_what_has_no_equality_of_its_own() -> None:
    assert same(Table([1, 2]), Table([1, 2]))
    assert not same(Table([1, 2]), Table([1, 3]))
    assert same(Slotted(1), Slotted(1))
    assert not same(Slotted(1), Slotted(2))
    assert same(SlottedSample(torch.zeros(2)), SlottedSample(torch.zeros(2)))
    assert not same(SlottedSample(torch.zeros(2)), SlottedSample(torch.ones(2)))


def test_of_what_nothing_can_be_compared_nothing_is_known_to_differ() -> None:
    assert same([lambda: 1], [lambda: 1])
