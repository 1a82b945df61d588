"""Checksums of tensors and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from heliograph.packages.tests.waits import no_reads
from heliograph_recorder.digests import checksums
from heliograph_recorder.digests.checksums import checksum
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


def numbers(value: Any) -> list[int]:
    """Return the parts of a checksum as numbers, wherever they were computed."""
    return list(map(int, checksum(value)))


TENSORS = {
    "small floats": torch.arange(60.0).reshape(12, 5),
    "more than is small": torch.arange(3 * 4000).reshape(3, 4000),
    "half": torch.arange(30.0).reshape(6, 5).to(torch.bfloat16),
    "flags": torch.arange(12).reshape(4, 3) % 2 == 0,
    "complex": torch.arange(8.0).reshape(4, 2).to(torch.complex64),
    "a part of another": torch.arange(60.0).reshape(12, 5)[1:, 1:4],
    "bytes from an odd place": torch.arange(40, dtype=torch.uint8)[3:],
}


@pytest.mark.parametrize("name", TENSORS)
def test_each_bit_of_a_tensor_changes_its_checksum(name: str) -> None:
    tensor = TENSORS[name]
    whole = numbers(tensor)
    flat = tensor.clone().contiguous().view(torch.uint8).flatten()
    for place in {0, len(flat) // 2, len(flat) - 1}:
        for bit in (0, 7) if tensor.dtype != torch.bool else (0,):
            other = flat.clone()
            other[place] ^= 1 << bit
            assert numbers(other.view(tensor.dtype).reshape(tensor.shape)) != whole


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TENSORS)
def test_on_a_device_too_each_bit_changes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor for which `is_cpu` is False takes the way of a device; few words at once, so that there are several."""
    tensor = TENSORS[name]
    for at_once in (checksums.AT_ONCE, 100):
        monkeypatch.setattr(checksums, "AT_ONCE", at_once)
        with no_reads():
            whole = checksum([tensor, tensor])
        assert [isinstance(part, Tensor) for part in whole] == [False, True]
        flat = tensor.clone().contiguous().view(torch.uint8).flatten()
        for place in {0, len(flat) // 2, len(flat) - 1}:
            other = flat.clone()
            other[place] ^= 1
            with no_reads():
                changed = checksum([tensor, other.view(tensor.dtype).reshape(tensor.shape)])
            assert changed[0] == whole[0]
            assert int(changed[1]) != int(whole[1])


def test_of_many_tensors_on_a_device_few_are_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[ref[Tensor]] = []
    join = torch.cat

    def joined(tensors: list[Tensor]) -> Tensor:
        assert sum(copy() is not None for copy in copies) <= 1
        copy = join(tensors)
        copies.append(ref(copy))
        return copy

    monkeypatch.setattr(checksums, "AT_ONCE", 8)
    monkeypatch.setattr(torch, "cat", joined)
    with no_reads():
        checksum([torch.arange(4, dtype=torch.int32) for _ in range(16)])
    assert len(copies) == 4


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.data())
def test_what_is_equal_has_equal_checksums_wherever_it_lies(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    spread = torch.stack([tensor, tensor], 1)[:, 1]  # not contiguous
    assert numbers(tensor) == numbers(spread)
    place = data.draw(st.integers(0, len(values) - 1))
    other = tensor.clone()
    other[place] += data.draw(st.integers(1, 2**62))
    assert numbers(tensor) != numbers(other)


@dataclass
class Graph:
    """A batch of a class of the user's own."""

    nodes: Tensor
    names: list[str]


BATCHES: dict[str, tuple[Any, Any]] = {
    "a tuple": ((torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))),
    "a tuple in another order": ((torch.ones(2), torch.zeros(2)), (torch.zeros(2), torch.ones(2))),
    "a dict": ({"x": torch.ones(2), "y": 1}, {"x": torch.ones(2), "y": 2}),
    "names of a dict": ({"x": torch.ones(2)}, {"z": torch.ones(2)}),
    "texts": (["a", "b"], ["a", "c"]),
    "an array": (np.ones((2, 3)), np.zeros((2, 3))),
    "an object": (Graph(torch.ones(2), ["a"]), Graph(torch.ones(2), ["b"])),
    "a tensor that needs a gradient": (torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)),
    "without dimensions": (torch.tensor(1.0), torch.tensor(2.0)),
    "another shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "another type": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    "another shape of large samples": (torch.zeros(2, 900), torch.zeros(2, 30, 30)),
    "one large tensor or two": ([torch.zeros(4, 900)], [torch.zeros(2, 900), torch.zeros(2, 900)]),
    "an array of texts": (np.array(["a", "b"]), np.array(["a", "c"])),
    "an object array without dimensions": (np.array({"a": 1}, dtype=object), np.array({"a": 2}, dtype=object)),
    "a big-endian array": (np.ones(3, ">f4"), np.zeros(3, ">f4")),
    "a long double": (np.ones(3, np.longdouble), np.zeros(3, np.longdouble)),
    "sparse": (torch.eye(3).to_sparse(), torch.diag(torch.arange(3.0)).to_sparse()),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_any_kind(name: str) -> None:
    one, other = BATCHES[name]
    assert numbers(one) == numbers(one)
    assert numbers(one) != numbers(other)


def test_where_equal_values_lie_makes_no_difference() -> None:
    values = torch.arange(24.0).reshape(4, 6)
    for other in (values.repeat(1, 2)[:, :6], values.T.contiguous().T, values.clone().requires_grad_()):
        assert numbers(other) == numbers(values)
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    read_only = array.copy()
    read_only.flags.writeable = False
    assert numbers(read_only) == numbers(array)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch: it is in beta state
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc])
def test_compressed_tensors(layout: torch.layout) -> None:
    one, other = (each.to_sparse(layout=layout) for each in (torch.eye(4), torch.diag(torch.arange(4.0))))
    assert numbers(one) == numbers(one)
    assert numbers(one) != numbers(other)


@pytest.mark.parametrize("batch", [[], (), {}, set(), [[], {}]])
def test_an_empty_batch_has_a_checksum_as_what_was_read(batch: Any) -> None:
    assert len(numbers(batch)) == 1
    assert numbers(batch) != numbers([torch.zeros(2)])


def test_what_contains_itself_is_read_once() -> None:
    batch: list[Any] = [torch.ones(2)]
    batch.append(batch)
    assert numbers(batch) != numbers([torch.zeros(2)])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_tensor(shape: tuple[int, int]) -> None:
    assert numbers(torch.zeros(shape)) != numbers(torch.zeros(0, 0))
