"""Means over the samples of several ranks, added up without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heliograph import DeviceEngine
from heliograph.core.distributed.means import SharedMeans, Terms, merge_means
from heliograph.core.metrics.means import Means
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [None, torch.float32, torch.float64, torch.bfloat16, torch.int64]
NUMBERS = st.floats(-1e3, 1e3)
VALUES = st.lists(st.tuples(NUMBERS, st.integers(0, 9)), min_size=1, max_size=200)


class Peers(DeviceEngine):
    """Several ranks whose values are known."""

    def __init__(self, *of_ranks: Any) -> None:
        super().__init__("cpu")
        self.of_ranks = of_ranks

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.of_ranks]


def as_given(value: float, dtype: torch.dtype | None) -> Tensor | float:
    return value if dtype is None else torch.tensor(value).to(dtype)


@given(values=VALUES, dtype=st.sampled_from(DTYPES), ranks=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_any_number_of_ranks_adds_up_as_one(values: list[Any], dtype: torch.dtype | None, ranks: int) -> None:
    """Batch by batch in turn, whatever the values are, to the last bit."""
    alone, of_ranks = Means(), [Terms() for _ in range(ranks)]
    for number, (value, weight) in enumerate(values):
        own = of_ranks[number % ranks]
        own.batch = number // ranks
        for means in (alone, own):
            means.add("loss", as_given(value, dtype), weight)
            means.add("number", value, weight)
            if number % 3:
                means.add("some", torch.tensor(value), weight)
    together = merge_means([terms.take() for terms in of_ranks], DeviceEngine("cpu"))

    assert together.read("validation") == alone.read("validation")
    assert of_ranks[0].take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_and_so_on_a_gpu() -> None:
    alone, of_ranks = Means(), [Terms(), Terms()]
    for number, value in enumerate(torch.randn(300, device="cuda")):
        of_ranks[number % 2].batch = number // 2
        for means in (alone, of_ranks[number % 2]):
            means.add("loss", value, 7)
    together = merge_means([terms.take() for terms in of_ranks], DeviceEngine("cuda"))

    assert together.read("validation") == alone.read("validation")


def test_a_value_is_kept_as_it_was() -> None:
    terms = Terms()
    value = torch.ones(1, requires_grad=True)
    terms.add("loss", value, 2)
    with torch.no_grad():
        value.fill_(9.0)
    ((batches, values, weights, are_sums),) = terms.take().values()

    assert (batches, values.tolist(), weights, are_sums) == ([0], [1.0], [2.0], [False])  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(0)])
def test_what_is_no_scalar_is_refused(value: Tensor) -> None:
    with pytest.raises(ValueError, match="Metric 'acc' must"):
        Terms().add("acc", value)


def test_what_is_not_a_number_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"^Metric 'acc' must"):
        Terms().add("acc", None)  # type: ignore[arg-type]


def test_sums_of_all_ranks() -> None:
    means = SharedMeans(Peers(({"loss": (6.0, 2.0), "theirs": (1.0, 4.0)}, []), ({"loss": (0.5, 1.0)}, [])))
    means.add("loss", torch.tensor(2.0), 5)
    means.add("mine", 3.0)
    means.add("nothing", 3.0, 0.0)

    assert means.read("train") == {"train/loss": 16.5 / 8, "train/mine": 3.0, "train/theirs": 0.25}
    assert means.state_dict() == {}
