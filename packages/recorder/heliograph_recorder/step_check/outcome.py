"""What a forward and backward pass came to: the loss, and the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one forward and backward pass.

    Attributes:
        loss: a scalar tensor.
        gradients: of each parameter, by its name; None where it has none.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]

    @classmethod
    def now(cls, loss: Tensor, parameters: Mapping[str, Tensor]) -> Outcome:
        """Return it as it is now; the gradients are the very tensors of the parameters."""
        return cls(loss.detach(), {name: each.grad for name, each in parameters.items()})


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return what differs between two outcomes, in words, at most in one bit; waits for the device."""
    found = [] if has_same_bits(one.loss, other.loss) else ["the loss"]
    return found + [
        f"the gradient of {name}"
        for name, gradient in one.gradients.items()
        if not has_same_bits(gradient, other.gradients[name])
    ]


def has_same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors are equal down to the last bit: so a NaN equals itself, and 0.0 is not -0.0."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.contiguous().view(-1).view(torch.uint8)
