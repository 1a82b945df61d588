"""Values as digests: which count as equal, how they are shown."""

from __future__ import annotations

import csv
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.core.objects.program import differing, encode, show_both
from heliograph.tests.messages import assert_each
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

NUMBERS = 5_000
LARGE = torch.arange(float(NUMBERS)).reshape(NUMBERS, 1)


def changed(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[-2] += 1
    return other


def is_equal(first: Any, second: Any, *, is_data: bool = False) -> bool:
    return not [*differing({"": encode(first, is_data=is_data)}, {"": encode(second, is_data=is_data)})]


@pytest.mark.parametrize("is_data", [False, True])
def test_numbers_are_compared_by_all_of_their_bits(is_data: bool) -> None:
    compare = partial(is_equal, LARGE, is_data=is_data)
    assert compare(LARGE.clone())
    assert not compare(changed(LARGE))
    assert not compare(LARGE.double())
    assert not compare(LARGE.reshape(-1))
    assert is_equal(float("nan"), float("nan"))
    assert not is_equal(0.0, -0.0)
    assert not is_equal(1, 1.0)
    assert not is_equal(np.float64(1), 1.0)


def test_where_numbers_lie_in_memory_does_not_count() -> None:
    assert is_equal(LARGE[:10].T, LARGE[:10].T.contiguous())
    assert is_equal([LARGE, LARGE[3]], [LARGE.clone(), LARGE[3].clone()])


def test_of_large_data_a_sample_and_the_length_count() -> None:
    numbers = torch.arange(1_000_000)
    other = numbers.clone()
    other[0] = 5
    assert not is_equal(numbers, other, is_data=True)
    other = numbers.clone()
    other[-2] = 5
    assert is_equal(numbers, other, is_data=True)
    assert not is_equal(numbers, other)
    names = [f"{number}.png" for number in range(100_000)]
    assert not is_equal(names, names[:-1], is_data=True)
    assert is_equal(names, [*names[:-1], "x.png"], is_data=True)
    assert not is_equal(names, [*names[:-1], "x.png"])


def test_paths_ranges_and_dtypes_are_compared() -> None:
    assert not is_equal(Path("a"), Path("b"), is_data=True)
    assert not is_equal(range(3), range(4))
    assert not is_equal([torch.float32], [torch.float64])


def test_a_value_is_shown_in_a_message() -> None:
    values: list[Any] = [torch.tensor(3), [0.1, "a"], LARGE, [*range(1000)], {"a": 1}, Path("a"), "x" * 100]
    assert [encode(value)["text"] for value in values] == [
        "tensor(3)",
        "[0.1, 'a']",
        "a tensor [5000, 1]",
        "a list of 1000",
        "{'a': 1}",
        "PosixPath('a')",
        "a str of 100",
    ]
    assert show_both(encode(LARGE), encode(changed(LARGE))) == ("a tensor [5000, 1]", "one with other values")


def test_what_cannot_be_read_is_named() -> None:
    deep: list[Any] = []
    for _ in range(2_000):
        deep = [deep]
    assert "too deep" in encode(deep)["unseen"]
    assert encode((number for number in [1]), is_data=True)["unseen"] == "builtins.generator"
    assert encode({"reader": csv.reader([])}, is_data=True)["unseen"] == "['reader']: _csv.reader"


def test_the_generators_of_data_do_not_count() -> None:
    first, second = random.Random(1), random.Random(2)
    assert is_equal([first], [second], is_data=True)
    assert not is_equal([first], [second])


class Cut(h.Plugin):
    """Keeps the state of the second step, or resumes one."""

    affects_training = False

    def __init__(self, saved: dict[str, Any], *, resumes: bool = False) -> None:
        self.saved, self.resumes = saved, resumes

    @h.on(h.TrainStart)
    def resume(self, run: h.Run, event: h.TrainStart) -> None:
        if self.resumes:
            run.resume(self.saved)

    @h.on(h.StepEnd)
    def keep(self, run: h.Run, event: h.StepEnd) -> None:
        if run.progress.steps == 2 and not self.resumes:
            self.saved |= deepcopy(run.state_dict())


def loader(data: Tensor, weights: Tensor, indices: list[int]) -> DataLoader[Any]:
    subset = Subset(TensorDataset(data, torch.zeros(NUMBERS, 1)), indices)
    return DataLoader(subset, 50, sampler=WeightedRandomSampler(weights, 200))  # type: ignore[arg-type]  # it takes one


@pytest.mark.parametrize("changes", [(), (0,), (1,), (2,)])
def test_a_resume_compares_data(changes: tuple[int, ...]) -> None:
    saved: dict[str, Any] = {}
    weights, indices = torch.linspace(0.5, 1, NUMBERS, dtype=torch.float64), list(range(NUMBERS))
    places = ("dataset.tensors", "sampler.weights", "dataset.indices")

    def fit(*parts: Any, resumes: bool) -> tuple[str, ...]:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
        trainer = h.Trainer([h.RNGCapture(), Cut(saved, resumes=resumes)], device="cpu")
        result = trainer.fit(task, loader(*parts), optimizer=lambda each: torch.optim.SGD(each, 0.01), steps=3)
        return () if result.resume is None else result.resume.reasons

    fit(LARGE, weights, indices, resumes=False)
    others = [changed(LARGE), changed(weights), [1, *indices[1:]]]
    now = [others[n] if n in changes else part for n, part in enumerate((LARGE, weights, indices))]
    found = [text for text in fit(*now, resumes=True) if "the program sets it" in text]

    kinds = ("a tuple of 2", "a tensor [5000]", "a list of 5000")
    assert_each(found, *[(places[n], kinds[n], "other values") for n in changes])
