"""What operators are given is compared: numbers, and all else that has a value."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heliograph_recorder.step_check.operators import CallDigests, OperatorCall, difference_of
from torch import Tensor, nn

INPUTS = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], str, str]] = {
    "a number": (lambda x: x * 1.0, lambda x: x * 1.5, "mul.Tensor", "1.0 in the first, 1.5"),
    "a default": (lambda x: x + x, lambda x: x.add(x, alpha=2), "add.Tensor", "the default in the first, alpha=2"),
    "a string": (nn.GELU(), nn.GELU("tanh"), "gelu.default", "the default in the first, approximate='tanh'"),
    "None": (
        lambda x: x.clamp(min=0.0),
        lambda x: x.clamp(min=0.0, max=9.0),
        "clamp.default",
        "the default in the first, 9.0",
    ),
    "a bool": (
        lambda x: x.sum(0, keepdim=True),
        lambda x: x.sum(0),
        "sum.dim_IntList",
        "True in the first, the default",
    ),
    "a list": (lambda x: x.sum(0), lambda x: x.sum((0, 1)), "sum.dim_IntList", "[0] in the first, [0, 1]"),
    "a dtype": (
        lambda x: x.to(torch.float64),
        lambda x: x.to(torch.float16),
        "_to_copy.default",
        "dtype=torch.float64 in the first, dtype=torch.float16",
    ),
    "a memory format": (
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x.clone(memory_format=torch.preserve_format),
        "clone.default",
        "memory_format=torch.contiguous_format in the first, memory_format=torch.preserve_format",
    ),
}


def calls_of(act: Callable[[Tensor], object]) -> list[OperatorCall]:
    digests = CallDigests()
    with digests:
        act(INPUTS)
    return digests.calls


@pytest.mark.parametrize("name", CASES)
def test_what_an_operator_is_given_is_compared(name: str) -> None:
    one, other, operator, values = CASES[name]
    found = difference_of(calls_of(one), calls_of(other))
    assert found == f"operator 1, aten.{operator}, is given other values: {values} in the second"
    assert difference_of(calls_of(one), calls_of(one)) is None


def test_devices_are_not_compared() -> None:
    (call,) = calls_of(lambda x: torch.zeros(2, device="cpu"))
    (other,) = calls_of(lambda x: torch.zeros(2, device="cpu:0"))
    assert call == other
    assert "device=a device" in call.arguments


def test_a_parameter_is_a_tensor_of_its_bits() -> None:
    parameter, tensor = nn.Parameter(torch.ones(3), requires_grad=False), torch.ones(3)
    assert calls_of(lambda x: x * parameter) == calls_of(lambda x: x * tensor)


def test_generators_have_no_value_to_compare() -> None:
    def draw(inputs: Tensor) -> Tensor:
        return torch.bernoulli(inputs.abs().clamp(0, 1), generator=torch.Generator().manual_seed(1))

    assert difference_of(calls_of(draw), calls_of(draw)) is None
