"""Which datasets are nothing but data."""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.core.data import keyed
from heliograph.core.data.keyed import is_plain_data
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map

Point = namedtuple("Point", ["x"])  # as users write it


class OwnTensor(Tensor):
    """Could run anything when it is indexed or stacked."""


class OwnData(TensorDataset):
    """Could run anything."""


class OwnInt(int):
    """Could run anything as an index."""


def tensors() -> TensorDataset:
    return TensorDataset(torch.zeros(4, 2), torch.zeros(4))


def with_method(name: str) -> TensorDataset:
    data = tensors()
    setattr(data, name, lambda *given: None)
    return data


def with_facts() -> TensorDataset:
    data = tensors()
    data.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    return data


LIST: Any = [1, 2, 3, 4]  # torch takes it for a dataset, its annotations do not
PLAIN: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "parameters": lambda: TensorDataset(torch.nn.Parameter(torch.zeros(4))),
    "facts": with_facts,
    "pairs": lambda: [(torch.zeros(2), 1)] * 4,
    "columns": lambda: ({"x": np.zeros(2), "name": "a", "y": [1.0, np.float32(2), None]},) * 4,
    "objects of none": lambda: [None, b"a", True, 1j],
    "subset": lambda: Subset(tensors(), range(2)),
    "subset of subset": lambda: Subset(Subset(tensors(), [0, 1]), (0,)),
    "concatenated": lambda: ConcatDataset([tensors(), LIST]),
    "stacked": lambda: StackDataset(tensors(), LIST),
    "stacked by name": lambda: StackDataset(x=tensors(), y=LIST),
    "empty": list,
}
NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "own class": lambda: OwnData(torch.zeros(4)),
    "own list": lambda: type("Own", (list,), {})([1, 2]),
    "own tensor": lambda: TensorDataset(torch.zeros(4).as_subclass(OwnTensor)),
    "own tensor in a list": lambda: [(torch.zeros(4).as_subclass(OwnTensor), 1)],
    "object": lambda: [1, 2, object()],
    "deep object": lambda: [{"x": [(1, [{"y": object()}])]}],
    "object as a key": lambda: [{object(): 1}],
    "mapping": lambda: [UserDict(x=1)],
    "subclass of dict": lambda: [OrderedDict(x=1)],
    "named tuple": lambda: [Point(1)],
    "generator": lambda: [np.random.default_rng(1)],
    "own index": lambda: Subset(tensors(), [OwnInt(1)]),
    "subset of own": lambda: Subset(OwnData(torch.zeros(4)), [0]),
    "concatenated with own": lambda: ConcatDataset([tensors(), OwnData(torch.zeros(4))]),
    "stacked with own": lambda: StackDataset(x=tensors(), y=OwnData(torch.zeros(4))),
    "method on the object": lambda: with_method("__getitems__"),
    "set_epoch on the object": lambda: with_method("set_epoch"),
    "dataset": lambda: Dataset(),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("collate", [default_collate, default_convert])
def test_data_alone(name: str, collate: Any) -> None:
    assert is_plain_data(PLAIN[name](), collate)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_may_run_code(name: str) -> None:
    assert not is_plain_data(NOT_PLAIN[name](), default_collate)


def test_what_contains_itself() -> None:
    data: list[Any] = [1]
    data += [data] * 3

    assert not is_plain_data(data, default_collate)


@pytest.mark.parametrize("collate", [lambda batch: batch, len])
def test_another_collate_function(collate: Any) -> None:
    assert not is_plain_data(tensors(), collate)


@pytest.mark.parametrize("kind", [int, Point])
def test_a_function_of_the_user_in_torchs_registry(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map=None: batch)

    assert not is_plain_data(tensors(), default_collate)


def test_no_list_of_all_values_is_made() -> None:
    data = [[7] * 1000] * 1000
    tracemalloc.start()
    try:
        assert is_plain_data(data, default_collate)
        assert tracemalloc.get_traced_memory()[1] < 200_000  # the values alone take 8 MB as one list
    finally:
        tracemalloc.stop()


def test_the_look_ends_at_the_first_that_is_not_data(monkeypatch: pytest.MonkeyPatch) -> None:
    look, looks = keyed._is_plain, list[Any]()

    def counted(items: Any, *levels: int) -> bool:
        looks.append(items)
        return look(items, *levels)

    monkeypatch.setattr(keyed, "_is_plain", counted)

    assert not is_plain_data([[1], [object()], [2]], default_collate)
    assert looks[1:] == [[1], looks[2]]
    assert len(looks) == 3
