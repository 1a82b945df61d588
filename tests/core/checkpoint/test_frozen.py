"""Checkpoints of what is trained: frozen weights are left out, and verified by their digests."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from heliograph.core.checkpoint.compatibility import verified_weights
from heliograph.core.checkpoint.ranks import digest
from heliograph.core.objects.equality import SUMMED, sums
from heliograph.tests import kit
from torch import nn

BATCHES = kit.class_batches(4)
HEAD = {"2.weight", "2.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
def test_sums_are_of_bits_and_positions(dtype: torch.dtype) -> None:
    long = (torch.arange(2 * SUMMED + 10) % 251).to(dtype)
    other = [long.clone() for _ in range(4)]
    other[0][[0, 1]] = other[0][[1, 0]]
    other[1][:SUMMED] = long[SUMMED : 2 * SUMMED]
    other[1][SUMMED : 2 * SUMMED] = long[:SUMMED]
    other[2][-1] = 0
    other[3] = long.flip(0)
    table = long[:20].reshape(2, 10)
    same = sums({("", "a"): long, ("", "b"): long.clone(), ("", "t"): table.t(), ("", "c"): table.t().contiguous()})
    assert (same["", "a"], same["", "t"]) == (same["", "b"], same["", "c"])
    assert len({*sums({("", str(number)): each for number, each in enumerate([long, *other])}).values()}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_keep_round_values_that_change_places_apart(dtype: torch.dtype) -> None:
    table = torch.eye(24, dtype=dtype)
    swapped = []
    for first, second in combinations(range(24), 2):
        other = table.clone()
        other[[first, second]] = table[[second, first]]
        swapped.append(other)
    found = sums({("", str(number)): each for number, each in enumerate([table, *swapped])})
    assert len({*found.values()}) == 1 + len(swapped)


def test_digests_are_of_type_shape_and_bits() -> None:
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), -torch.zeros(4)]
    assert len({digest(each) for each in tensors}) == 4
    assert digest(torch.arange(6.0).reshape(2, 3).t()) == digest(torch.arange(6.0).reshape(2, 3).t().contiguous())
    divided = nn.Linear(1, 1)
    vars(divided.weight)["full_tensor"] = None  # as a DTensor has
    with pytest.raises(ValueError, match="shards its weights: read"):
        verified_weights("model", divided, {"weight": ""})


# On ranks.
