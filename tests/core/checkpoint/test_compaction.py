"""Tensors of any form: their files are no larger than needed, and they are equal and share memory when loaded."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from heliograph.builtin_callbacks.checkpoint.background_writer import Buffers
from heliograph.core.checkpoint.storage.archive import compacted
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

Make = Callable[..., Any]
pytestmark = [  # quantized tensors are still there
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn, base: Tensor) -> Tensor:
    """Draw a view of some memory, or a tensor that is none."""
    numbers = st.integers(0, 3)
    size = draw(st.lists(numbers, max_size=3))
    stride = [draw(st.integers(0, 4)) for _ in size]
    room = len(base) - sum(max(0, each - 1) * step for each, step in zip(size, stride, strict=True))
    tensor = base.as_strided(size, stride, draw(st.integers(0, max(0, room - 1))))
    kind = draw(st.sampled_from(["view", "parameter", "conj", "neg", "sparse", "transposed", "quantized", "clone"]))
    if kind == "parameter" and (tensor.is_floating_point() or tensor.is_complex()):
        return nn.Parameter(tensor, draw(st.booleans()))
    if kind == "conj" and tensor.is_complex():
        return tensor.conj()
    if kind == "neg" and tensor.is_complex():
        return tensor.conj().imag
    if kind == "sparse" and tensor.dim() and tensor.dtype != torch.bfloat16:
        return tensor.to_sparse()
    if kind == "quantized" and tensor.dtype == torch.float32:
        return torch.quantize_per_tensor(tensor.contiguous(), 0.5, 1, torch.qint8)
    return tensor.clone() if kind == "clone" else tensor.T if kind == "transposed" and tensor.dim() == 2 else tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a state whose tensors are views of few pieces of memory, some of them in several places."""
    bases = []
    for _ in range(draw(st.integers(1, 3))):
        dtype, length = draw(st.sampled_from(DTYPES)), draw(st.integers(32, 200))
        values = torch.arange(length) % 2 == 0 if dtype == torch.bool else torch.arange(length).to(dtype)
        bases.append(values * (1 + 1j) if dtype == torch.complex64 else values)
    found = [draw(tensors(draw(st.sampled_from(bases)))) for _ in range(draw(st.integers(1, 6)))]
    again = draw(st.lists(st.sampled_from([*bases, *found]), max_size=3))
    return {"a": {str(number): each for number, each in enumerate(found)}, "b": [(each, 1) for each in again]}


def leaves(state: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a state."""
    return [*state["a"].values(), *(each for each, _ in state["b"])]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor's values, for comparing."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()


def memory(tensor: Tensor) -> int | None:
    """Return where a tensor's values lie, None for one whose memory is not looked at."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    return int(tensor.untyped_storage().data_ptr())


def has_memory_of_two_dtypes(state: dict[str, Any]) -> bool:
    """Return whether tensors of several dtypes show the same memory, which cannot be saved as one."""
    plain_views = [each for each in leaves(state) if each.layout is torch.strided and not each.is_quantized]
    shown = {(each.untyped_storage().data_ptr(), each.dtype) for each in plain_views}
    return len(shown) > len({place for place, _ in shown})


@given(states(), st.booleans())
def test_every_form_comes_back_equal(state: dict[str, Any], in_background: bool) -> None:
    file = BytesIO()
    torch.save(compacted(Buffers().copy(state) if in_background else state)[0], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)

    for before, after in zip(leaves(state), leaves(loaded), strict=True):
        assert type(before) is type(after)
        assert (before.dtype, before.shape, before.requires_grad) == (after.dtype, after.shape, after.requires_grad)
        assert torch.equal(plain(before), plain(after))


@given(states())
def test_nothing_takes_more_than_it_shows_or_than_it_took(state: dict[str, Any]) -> None:
    found = leaves(compacted(state)[0])
    views = [each for each in found if memory(each) is not None]
    taken = {memory(each): each.untyped_storage().nbytes() for each in views}
    before = {memory(each): each.untyped_storage().nbytes() for each in leaves(state) if memory(each) is not None}

    if not has_memory_of_two_dtypes(state):
        assert sum(taken.values()) <= sum(before.values())
    for place, size in taken.items():
        assert size <= sum(each.nbytes for each in views if memory(each) == place)
    for one, other in zip(leaves(state), found, strict=True):
        assert one is other or memory(one) is None or memory(one) != memory(other)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    "part", [lambda whole: whole.real, lambda whole: whole.conj().imag, lambda whole: whole.view(torch.int16)]
)
def test_memory_of_two_dtypes_is_saved_twice(part: Make, in_background: bool) -> None:
    whole = torch.randn(8, dtype=torch.complex64)
    state = {"a": {"whole": whole, "part": part(whole)}, "b": []}
    file = BytesIO()
    torch.save(compacted(Buffers().copy(state) if in_background else state)[0], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["a"]

    assert torch.equal(loaded["whole"], whole)
    assert loaded["part"].dtype == part(whole).dtype
    assert torch.equal(loaded["part"], part(whole))


def test_a_frozen_and_a_trained_view_of_the_same_slice_stay_so_and_share_memory() -> None:
    part = torch.randn(100)[:10]
    state = {"frozen": nn.Parameter(part, False), "trained": nn.Parameter(part), "plain": part}

    found = compacted(state)[0]

    assert {name: (type(each), each.requires_grad) for name, each in found.items()} == {
        "frozen": (nn.Parameter, False),
        "trained": (nn.Parameter, True),
        "plain": (Tensor, False),
    }
    assert len({memory(each) for each in found.values()}) == 1
    assert found["plain"].untyped_storage().nbytes() == part.nbytes


def test_a_plain_tensor_that_is_trained_stays_so() -> None:
    state = compacted({"weight": torch.randn(100)[:10].requires_grad_()})[0]

    assert state["weight"].requires_grad
    assert type(state["weight"]) is Tensor


def test_tied_weights_are_written_once() -> None:
    whole = torch.randn(100_000)
    tied = {"whole": whole, "tied": whole, "parameter": nn.Parameter(whole), "part": whole[:10]}
    slices = {"slice": torch.randn(100_000)[:10], "other": torch.randn(5)}
    slices["slice, too"] = slices["slice"]
    kept, cut = compacted(tied)[0], compacted(slices)[0]

    assert kept is tied
    assert cut["slice"] is cut["slice, too"]
    assert cut["slice"].untyped_storage().nbytes() == 40
    assert cut["other"] is slices["other"]


def test_a_slice_takes_no_room_of_its_whole(opened: Make, state: Make) -> None:
    part = torch.arange(1_000_000.0)[5:8]
    entry = opened().save("a.pth", state(modules={"m": {"part": part, "again": part}}))
    loaded = torch.load(entry.path, weights_only=True)["modules"]["m"]
    loaded["part"][0] = -1

    assert entry.size < 10_000
    assert loaded["again"].tolist() == [-1.0, 6.0, 7.0]
    assert part.tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize("size", [(10**6, 10**6), (32, 16, 64, 64)])
def test_what_is_expanded_takes_what_it_is_made_of(opened: Make, state: Make, size: tuple[int, ...]) -> None:
    expanded = torch.ones(()).expand(size)

    assert opened().save("a.pth", state(modules={"m": {"expanded": expanded}})).size < 10_000


def test_numpys_memory_that_is_seen_as_two_dtypes_is_saved(opened: Make, state: Make) -> None:
    raw = np.arange(4, dtype=np.int32)
    both = {"bits": torch.from_numpy(raw), "numbers": torch.from_numpy(raw.view(np.float32))}
    loaded = torch.load(opened().save("a.pth", state(modules={"m": both})).path, weights_only=True)["modules"]["m"]

    assert {name: each.dtype for name, each in loaded.items()} == {"bits": torch.int32, "numbers": torch.float32}
    assert all(torch.equal(loaded[name], both[name]) for name in both)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("in_background", [False, True])
def test_nested_and_compressed_tensors_are_saved(opened: Make, state: Make, in_background: bool) -> None:
    odd = {"nested": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]), "csr": torch.eye(4).to_sparse_csr()}
    given = Buffers().copy(odd) if in_background else odd
    loaded = torch.load(opened().save("a.pth", state(modules={"m": given})).path, weights_only=True)["modules"]["m"]

    assert [each.tolist() for each in loaded["nested"].unbind()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    assert loaded["csr"].layout is torch.sparse_csr
    assert torch.equal(loaded["csr"].to_dense(), torch.eye(4))
