"""Values down to the last bit, and differences in words."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.objects.equality import leaves
from heliograph.core.trace import Difference, Fact
from heliograph.tests.messages import assert_facts

NAMES = ("one", "the other")


def fact(value: Any, what: str = "batch") -> Fact:
    return Fact(what, "in epoch 0, batch 2, step 1", (0, 2, 1), leaves(value))


def first_of(one: list[Fact], other: list[Fact], **options: Any) -> Difference | None:
    return next(Difference.between(one, other, names=NAMES, **options), None)


def sentence(one: Any, other: Any, what: str = "batch") -> str:
    found = first_of([fact(one, what)], [fact(other, what)])
    assert found is not None
    assert found.place == (0, 2, 1)
    return found.text


def test_every_value_has_a_path() -> None:
    value = {"images": [torch.zeros(2), np.ones(3)], 3: ("a", None, {"deep": 1.5})}
    assert list(leaves(value)) == ["images[0]", "images[1]", "[3][0]", "[3][1]", "[3][2].deep"]
    assert list(leaves(2)) == [""]


@dataclass
class Sample:
    image: Any
    label: int


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1 + 2**-56),
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ("a", b"a"),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)),
        (torch.tensor([1j]), torch.tensor([2j])),
        (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array([{"a": 1}]), np.array([{"a": 2}])),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (deque([1, 2]), deque([1, 3])),
        (Sample(torch.zeros(2), 1), Sample(torch.ones(2), 1)),
        (Slotted(1), Slotted(2)),
        (generator(1), generator(2)),
        (random.Random(1), random.Random(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (Path("a"), Path("b")),
        (leaves, fact),
        (int, float),
    ],
)
def test_small_differences_are_found(one: Any, other: Any) -> None:
    assert leaves(one) != leaves(other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: torch.tensor([float("nan")]),
        lambda: torch.zeros(0, 3),
        lambda: torch.arange(6).reshape(2, 3).T,
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: torch.ones(2, requires_grad=True),
        lambda: Sample(torch.zeros(2), 1),
        lambda: Slotted({"a": [1]}),
        lambda: generator(1),
        lambda: torch.Generator().manual_seed(1),
        lambda: {"a", "b", "c"},
        lambda: (_ for _ in ()),  # cannot be pickled: its type counts
    ],
)
def test_equals_are_equal(make: Any) -> None:
    assert leaves(make()) == leaves(make())


def test_a_value_that_contains_itself() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert list(leaves(circle)) == ["[0]"]


def test_a_large_tensor_is_compared_although_only_a_sample_is_kept() -> None:
    one = torch.zeros(100_000)
    other = one.clone()
    other[99_999] = 1.0
    (leaf,) = leaves(one).values()
    assert leaf.sample.size <= 4096
    assert_facts(sentence(one, other), "batch", "epoch 0", "batch 2", "step 1", "some bits", "float32", "[100000]")


def test_differences_in_words() -> None:
    here = ("epoch 0", "batch 2", "step 1")
    off = sentence({"x": torch.zeros(2)}, {"x": torch.tensor([0.0, 0.25])})
    assert_facts(off, "batch (x)", *here, "0.25", "float32", "[2]")
    assert_facts(sentence(torch.zeros(2), torch.zeros(3)), "step 1", "[2]", "[3]")
    assert_facts(sentence({"a": 1}, {}, "plugin toy"), "plugin 'toy' (a)", *here, "1 in one", "nothing")
    assert_facts(sentence({"lr": 0.1}, {"lr": 0.2}, "modules"), "weights (lr)", "epoch 0")
    assert_facts(sentence("a" * 100, "b"), f"'{'a' * 59}...", "'b'")
    assert_facts(sentence(torch.tensor(0.5), torch.tensor(0.25), "loss"), "step 1", "0.5", "0.25")
    bits = sentence(torch.tensor([1.0, float("inf")]), torch.tensor([float("nan"), float("inf")]))
    assert_facts(bits, "some bits", "float32", "[2]")


def test_one_run_that_does_more_than_the_other() -> None:
    longer, shorter = [fact(1), fact(2, "loss")], [fact(1)]
    whole = first_of(longer, shorter)
    assert whole is not None
    assert_facts(whole.text, "order", "the loss", "epoch 0", "batch 2", "step 1", "end of the run")
    beyond = first_of(shorter, longer)
    assert beyond is not None
    assert_facts(beyond.text, "order", "end of the run", "the loss", "epoch 0")


def test_values_that_are_set_aside() -> None:
    one = [fact({"a": 1, "b": 2}, "plugin toy"), fact({"train/speed": 1.0}, "metrics"), fact(1, "loss")]
    other = [fact({"a": 1, "b": 3}, "plugin toy"), fact({"train/speed": 2.0}, "metrics"), fact(2, "loss")]
    found = [(each.what, each.paths) for each in Difference.between(one, other)]
    assert found == [("plugin toy", ("b",)), ("metrics", ("train/speed",)), ("loss", ("",))]
    first = first_of(one, other, aside=frozenset({("plugin toy", "b"), ("metrics", "train/speed")}))
    assert first is not None
    assert first.what == "loss"
    assert first_of(one[:1], other[:1], aside=frozenset({("plugin toy", "")})) is None
