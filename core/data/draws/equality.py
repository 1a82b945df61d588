"""Whether two batches, of whatever kind, are equal to the last bit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values are equal, bit for bit where they are tensors or arrays."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _bits(one) == _bits(other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
            return False
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return same(one.tolist(), other.tolist()) if one.dtype.hasobject else one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return bool(one == other)
    if _has_own_equality(one):
        return bool(one.equals(other))
    try:
        equal = bool(one == other) or (one != one and other != other)
    except (RuntimeError, TypeError, ValueError):  # an equality of tensors within, that is neither true nor false
        equal = False
    if equal or (_compares(one) and not hasattr(one, "__dict__")):
        return equal
    own = getattr(one, "__dict__", None)
    return same(own, vars(other)) if own else _pickled(one) == _pickled(other)


def _has_own_equality(value: Any) -> bool:
    """Return whether something compares by its elements, as tables of pandas and pyarrow do."""
    return callable(getattr(type(value), "equals", None))


def _compares(value: Any) -> bool:
    """Return whether something is equal to more than itself."""
    own: Any = type(value).__eq__
    return own is not object.__eq__


def _pickled(value: Any) -> bytes | None:
    """Return the bytes of what has nothing else to be compared by, None where it has none either."""
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # whatever its way to be copied does: then nothing is known to differ
        return None


def _bits(value: Tensor) -> tuple[Any, ...]:
    dense = value.detach().cpu().to_dense().contiguous()
    return value.dtype, tuple(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
