"""Kept buffers: a copy holds the moment, ties stay tied, memory is used again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from io import BytesIO
from typing import Any

import pytest
import torch
from heliograph.builtin_callbacks.checkpoint.background_writer import Buffers, sizes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_copy_holds_the_moment_it_was_made() -> None:
    state: dict[str, Any] = {"a": torch.ones(3), "deep": [1, {"b": torch.zeros(2)}, ("x", None)], "n": 5}
    copy = Buffers().copy(state)
    state["a"].add_(1)
    state["deep"][1]["b"].fill_(7)
    state["deep"].append("late")
    state["n"] = 6

    assert copy["a"].tolist() == [1.0, 1.0, 1.0]
    assert copy["deep"][1]["b"].tolist() == [0.0, 0.0]
    assert copy["deep"][2:] == [("x", None)]
    assert copy["n"] == 5


def test_kinds_of_containers_stay() -> None:
    state: dict[str, Any] = {"counter": Counter(a=2), "ordered": OrderedDict(b=1), "tuple": (1, [2])}
    copy = Buffers().copy(state)

    assert copy == state
    assert [type(each) for each in copy.values()] == [Counter, OrderedDict, tuple]
    assert copy["tuple"][1] is not state["tuple"][1]


def test_tied_weights_are_copied_once_and_stay_tied() -> None:
    weight = torch.arange(6.0)
    state = {"encoder": weight, "decoder": weight.view(2, 3), "tail": weight[4:]}
    copy = Buffers().copy(state)

    assert place(copy["encoder"]) == place(copy["decoder"]) == place(copy["tail"]) != place(weight)
    assert copy["decoder"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert copy["tail"].tolist() == [4.0, 5.0]
    assert dict(sizes_of(state)) == {(24, False): 1}


def test_a_copy_is_stored_in_as_many_bytes_as_the_state() -> None:
    weight = torch.randn(1000)
    state = {"encoder": weight, "decoder": weight.view(10, 100)}
    live, copied = BytesIO(), BytesIO()
    torch.save(state, live)
    torch.save(Buffers().copy(state), copied)

    assert live.getvalue() == copied.getvalue()


def test_buffers_are_used_again() -> None:
    buffers, weight, moment = Buffers(), torch.ones(4), torch.zeros(4)
    first = buffers.copy({"weight": weight, "moment": moment})
    places = [place(each) for each in first.values()]
    weight.add_(1)
    second = buffers.copy({"weight": weight.clone(), "moment": moment})

    assert [place(each) for each in second.values()] == places
    assert second["weight"].tolist() == [2.0] * 4
    assert first["weight"].tolist() == [2.0] * 4  # overwritten, as is said


def test_new_and_resized_tensors_get_buffers_and_unused_ones_go() -> None:
    buffers = Buffers()
    first = buffers.copy({"stays": torch.ones(4), "grows": torch.ones(2)})
    kept = place(first["stays"])
    second = buffers.copy({"stays": torch.ones(4), "grows": torch.full((3,), 2.0), "new": torch.full((4,), 3.0)})

    assert place(second["stays"]) == kept
    assert [each.tolist() for each in second.values()] == [[1.0] * 4, [2.0] * 3, [3.0] * 4]
    assert {size.bytes: len(kept) for size, kept in buffers._buffers_by_size.items()} == {16: 2, 12: 1}


def test_reserved_buffers_are_those_that_are_used() -> None:
    buffers, state = Buffers(), {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.int64)}
    buffers.reserve(sizes_of({"a": state["a"]}))
    buffers.reserve(sizes_of(state))
    reserved = {storage.data_ptr() for kept in buffers._buffers_by_size.values() for storage in kept}

    assert len(reserved) == 3
    assert {place(each) for each in buffers.copy(state).values()} == reserved


ODD = {
    "transposed": torch.arange(6).view(2, 3).T,
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(5),
    "empty": torch.empty(0, 3),
    "a scalar": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "bits": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "learned": torch.ones(2, requires_grad=True),
    "a parameter": nn.Parameter(torch.ones(2)),
    "computed": torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", ODD)
def test_any_tensor_comes_as_it_is(name: str) -> None:
    tensor = ODD[name]
    copy = Buffers().copy(tensor)

    assert torch.equal(copy.to_dense() if copy.is_sparse else copy, tensor.to_dense() if tensor.is_sparse else tensor)
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert name in ("sparse", "negative") or copy.stride() == tensor.stride()
    assert type(copy) is type(tensor)
    assert copy.requires_grad == tensor.requires_grad or not tensor.is_leaf
    assert copy is not tensor


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 7, 8, 12, 40_001])
def test_every_byte_is_copied(size: int) -> None:
    tensor = torch.arange(size).to(torch.uint8)

    assert torch.equal(Buffers().copy(tensor), tensor)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """Return nested states whose tensors share memory now and then."""
    bases = [torch.arange(float(draw(st.integers(1, 8)))) for _ in range(3)]

    def tensor() -> Tensor:
        base = draw(st.sampled_from(bases))
        return base[draw(st.integers(0, len(base) - 1)) :]

    leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.builds(tensor))
    nested = st.recursive(
        leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner))
    )
    return {"state": draw(nested), "bases": bases}


def frozen(value: Any) -> Any:
    """Return a value with its tensors as lists, so that `==` compares all of it."""
    if isinstance(value, Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return [frozen(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(st.lists(states(), min_size=1, max_size=3))
def test_any_state_is_copied_again_and_again(sequence: list[dict[str, Any]]) -> None:
    buffers = Buffers()
    for state in sequence:
        before = frozen(state)
        copy = buffers.copy(state)
        for base in state["bases"]:
            base.fill_(-1.0)
        assert frozen(copy) == before


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_pinned_and_complete() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    buffers, weight = Buffers(), torch.full((1 << 20,), 3.0, device="cuda")
    buffers.reserve(sizes_of(weight))
    copy = buffers.copy(weight)
    weight.zero_()

    assert copy.device.type == "cpu"
    assert copy.is_pinned()
    assert bool((copy == 3.0).all())
