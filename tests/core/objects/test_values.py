"""Values as plain data: what is copied, and what is digested."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.core.objects.values import encode, equal, show_both
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

NUMBERS = 5_000
LARGE = torch.arange(float(NUMBERS)).reshape(NUMBERS, 1)


def changed(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[-2] += 1
    return other


def test_a_large_tensor_of_data_is_kept_as_a_digest_of_all_of_it() -> None:
    encoded = encode(LARGE, is_data=True)
    assert encoded.keys() == {"digest", "kind"}
    assert encoded["kind"] == "a tensor [5000, 1]"
    assert equal(encoded, encode(LARGE.clone(), is_data=True))
    assert not equal(encoded, encode(changed(LARGE), is_data=True))
    assert not equal(encoded, encode(LARGE.double(), is_data=True))
    assert not equal(encoded, encode(LARGE.reshape(-1), is_data=True))


def test_a_large_tensor_that_can_be_restored_is_kept_whole() -> None:
    assert torch.equal(encode(LARGE)["value"], LARGE)


def test_few_numbers_of_data_are_kept_and_shown() -> None:
    assert torch.equal(encode(torch.arange(100), is_data=True)["value"], torch.arange(100))
    assert encode([torch.zeros(60), torch.zeros(60)], is_data=True).keys() == {"digest", "kind"}
    assert show_both(encode(torch.tensor(3), is_data=True), encode(torch.tensor(4), is_data=True)) == (
        "tensor(3)",
        "tensor(4)",
    )


def test_what_is_kept_of_data_does_not_change_with_it() -> None:
    data = torch.zeros(3)
    kept = encode([data], is_data=True)["value"]
    data += 1
    assert kept[0].tolist() == [0, 0, 0]


def test_options_of_many_values_are_kept_as_a_digest_of_all_of_them() -> None:
    many = [*range(1_000), {"deep": [[[[[[[[[[[[[[1]]]]]]]]]]]]]]}]
    encoded = encode(many, is_kept=False)
    assert encoded.keys() == {"digest", "kind"}
    assert encoded["kind"] == "a list of 1001"
    assert not equal(encoded, encode([*many[:-1], {"deep": [[[[[[[[[[[[[[2]]]]]]]]]]]]]]}], is_kept=False))
    assert encode([0.1, "a"], is_kept=False) == {"value": [0.1, "a"]}


def test_an_option_that_is_nested_too_deep_does_not_fail_a_save() -> None:
    deep: list[Any] = []
    for _ in range(2_000):
        deep = [deep]

    assert encode(deep, is_kept=False) == {"unseen": "it is too large to be compared", "kind": "a list of 1"}


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
    places = ("dataset.tensors 0", "sampler.weights", "dataset.indices")

    def fit(*parts: Any, resumes: bool) -> tuple[str, ...]:
        torch.manual_seed(0)
        task = h.Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
        trainer = h.Trainer([h.RNGCapture(), Cut(saved, resumes=resumes)], device="cpu")
        result = trainer.fit(task, loader(*parts), optimizer=lambda each: torch.optim.SGD(each, 0.01), steps=3)
        return () if result.resume is None else result.resume.reasons

    fit(LARGE, weights, indices, resumes=False)
    attributes = saved["objects"]["data"]
    assert all("value" not in attributes[place] for place in places)
    others = [changed(LARGE), changed(weights), [1, *indices[1:]]]
    now = [others[n] if n in changes else part for n, part in enumerate((LARGE, weights, indices))]
    found = [text for text in fit(*now, resumes=True) if "the program sets it" in text]

    kinds = ("a tensor [5000, 1]", "a tensor [5000]", "a list of 5000")
    assert found == [f"{places[n]} was {kinds[n]} and is one with other values: the program sets it" for n in changes]
