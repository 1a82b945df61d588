"""Outputs by batch, and what they are joined to: on one rank and on several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from heliograph import DDPEngine
from heliograph.core.outputs import Collection, OutputParts
from heliograph.tests.messages import assert_each
from heliograph.tests.ranks_pool import Pool
from torch import Tensor


def outputs(number: int) -> dict[str, Any]:
    """Return what a step would for a batch; the fourth is empty."""
    rows = 0 if number == 3 else number + 1
    tensor = torch.full((rows, 2), float(number), dtype=torch.bfloat16)
    return {
        "tensor": tensor,
        "array": np.full(rows, number),
        "list": [f"{number}.{row}" for row in range(rows)],
        "no": None,
    }


def check(joined: dict[str, Any], batches: int) -> None:
    numbers = [number for number in range(batches) for _ in range(0 if number == 3 else number + 1)]
    assert joined["tensor"].dtype is torch.bfloat16
    assert joined["tensor"].tolist() == [[number, number] for number in numbers]
    assert joined["array"].tolist() == numbers
    assert [each.partition(".")[0] for each in joined["list"]] == [str(number) for number in numbers]
    assert joined["no"] is None


def test_they_are_joined_in_order_and_let_go() -> None:
    parts = OutputParts("the loader")
    for number in range(5):
        parts.add(number, outputs(number))
    check(parts.join(), 5)
    assert (parts.numbers, parts.columns) == ([], [[], [], [], []])


def test_other_rows_are_refused_at_once() -> None:
    parts = OutputParts("the set 'a'")
    parts.add(0, {"logits": torch.ones(2, 3)})
    with pytest.raises(
        ValueError,
        match=r"because they differ: .*float32",
    ):
        parts.add(1, {"logits": torch.ones(2, 4)})
    with pytest.raises(TypeError) as caught:
        parts.add(1, 3)
    assert_each(caught.value.__notes__, ["set 'a'"])


def gathered(batches: int) -> dict[str, Any]:
    """Deal batches out to the ranks, and return the outputs of all."""
    engine, parts = DDPEngine(device="cpu"), OutputParts("the loader")
    with engine.process():
        for number in range(engine.rank, batches, engine.world_size):
            parts.add(number, outputs(number))
        return parts.gather(engine)  # type: ignore[no-any-return]


@pytest.mark.parametrize("batches", [1, 4, 5])
def test_ranks_gather_in_the_order_of_the_data(ranks: Pool, batches: int) -> None:
    """Of one batch, the second rank has none; of four, its last one is empty."""
    for joined in ranks(2).run(gathered, batches):
        check(joined, batches)


def unlike() -> str:
    engine, parts = DDPEngine(device="cpu"), OutputParts("the loader")
    with engine.process():
        parts.add(engine.rank, torch.ones(1, 2 + engine.rank))
        try:
            parts.gather(engine)
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_with_other_rows_say_so_on_each(ranks: Pool) -> None:
    one, other = ranks(2).run(unlike)
    assert one == other
    assert "because they differ: ['tensor', 'float32'" in one


def test_a_collection_joins_by_set_and_name() -> None:
    collection = Collection(0, 1)
    with pytest.raises(RuntimeError, match=r"run\.collect needs a current"):
        collection.add("x", torch.ones(1), 1)
    for dataset in ("", "a"):
        collection.dataset = dataset
        for collection.batch in range(2):
            collection.add("x", torch.full((1,), float(collection.batch)), 1)
    for name in ("", "a/b", 3):
        with pytest.raises(ValueError, match="name without '/'"):
            collection.add(name, [1], 1)  # type: ignore[arg-type]
    collection.join()
    assert {name: each.tolist() for name, each in collection.whole.items()} == {"x": [0, 1], "a/x": [0, 1]}
    with pytest.raises(KeyError, match="'y'; collected: 'x', 'a/x'"):
        collection.whole["y"]


def test_a_copy_is_kept() -> None:
    parts, value = OutputParts("the loader"), torch.zeros(1)
    parts.add(0, value)
    value += 1
    assert isinstance(joined := parts.join(), Tensor)
    assert joined.tolist() == [0]
