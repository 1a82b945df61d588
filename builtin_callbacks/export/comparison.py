"""The outputs of an exported model beside those of the module that it was made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tolerance = tuple[float, float]  # relative, absolute
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-6, 1e-8),
    torch.float32: (1e-3, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
EXACT: Tolerance = (0.0, 0.0)


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: Tolerance | None) -> float:
    """Return the largest absolute difference between outputs.

    Args:
        expected: of the module.
        found: of the exported model.
        tolerance: relative and absolute; by default by the type of each output, whole numbers and bools exactly.

    Raises:
        ValueError: another number of outputs, other shapes or types, or a difference beyond the tolerance.
    """
    if len(expected) != len(found):
        raise ValueError(f"it returns {len(found)} tensors, the module {len(expected)}")
    largest = 0.0
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"its output {number} is {other.dtype} of shape {list(other.shape)}, the module's {one.dtype} of "
                f"{list(one.shape)}"
            )
        relative, absolute = tolerance or TOLERANCES.get(one.dtype, EXACT)
        if not torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            raise ValueError(
                f"its output {number} differs by up to {_difference(one, other):.3g} from the module's, beyond "
                f"{relative:g} of the value plus {absolute:g}"
            )
        largest = max(largest, _difference(one, other))
    return largest


def _difference(one: Tensor, other: Tensor) -> float:
    difference = (one.double() - other.double()).abs()
    return float(difference.nan_to_num(nan=0.0, posinf=float("inf")).max()) if difference.numel() else 0.0
