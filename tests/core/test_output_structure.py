"""What a step may return, taken apart and put together."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from heliograph.core.outputs import put_together, shape_of, take_apart


class Boxes(NamedTuple):
    """A named tuple, as a detector returns it."""

    corners: torch.Tensor
    labels: list[str]


def test_it_is_put_together_as_it_was() -> None:
    value = {
        "logits": torch.ones(2, 3),
        "rest": (np.zeros((2, 1)), Boxes(torch.ones(2, 4), ["cat", "dog"])),
        "no": None,
    }
    structure, leaves = take_apart(value)
    again = put_together(structure, leaves)
    assert torch.equal(again["logits"], value["logits"])  # type: ignore[arg-type]
    assert again["no"] is None
    array, boxes = again["rest"]
    assert array.tolist() == [[0.0], [0.0]]
    assert (boxes._fields, boxes.labels, boxes.corners.shape) == (("corners", "labels"), ["cat", "dog"], (2, 4))


def test_other_mappings_are_dicts() -> None:
    structure, leaves = take_apart(OrderedDict(one=[1], two=[2]))
    assert put_together(structure, leaves) == {"one": [1], "two": [2]}


def test_leaves_are_small_copies_without_gradients() -> None:
    base = torch.ones(2, 1000, requires_grad=True)
    _, (leaf,) = take_apart(base[:, :1])
    assert leaf.untyped_storage().nbytes() == 8
    assert not leaf.requires_grad
    array = np.zeros(2)
    _, (copy,) = take_apart(array)
    array += 1
    assert copy.tolist() == [0, 0]


def test_tensors_in_lists_are_copied_too() -> None:
    inner = torch.zeros(1)
    _, (items,) = take_apart([{"box": inner}, (inner, "x")])
    inner += 1
    assert items == [{"box": torch.zeros(1)}, (torch.zeros(1), "x")]


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (torch.tensor(1.0), ValueError, "single number.*run.track"),
        ({"a": (torch.ones(2), np.array(2.0))}, ValueError, r"single number in \['a'\]\[1\]"),
        ("text", TypeError, "list.*each sample.*got a str"),
        ({"a": 1.5}, TypeError, r"float in \['a'\]"),
        ({None: [1]}, TypeError, r"int; got the.*\[None\]"),
        (torch.eye(2).to_sparse(), ValueError, r"torch.sparse_coo.*value.to_dense\(\)"),
        ([torch.ones(2)] * 3, ValueError, "3 items for 2"),
        (["a"], ValueError, "1 items for 2"),
        ({"a": torch.ones(7, 2, 3)}, ValueError, r"7 rows for 2.*\['a'\].*batch_size"),
    ],
)
def test_what_cannot_be_joined_is_refused(value: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        take_apart(value, 2)


def test_shapes_are_short() -> None:
    value = {"logits": torch.ones(2, 3), "more": (np.zeros(4, dtype=np.int32), ["a"], None)}
    assert shape_of(value) == "{'logits': float32 [2, 3], 'more': (int32 [4], list [1], None)}"
