"""One equality for values: the same types and the same bits."""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

K = TypeVar("K")
SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
EMPTY: Final = b""  # one object, which `torch.load(weights_only=True)` cannot read
LONGEST: Final = 4096  # of a text or bytes that is saved in its slot
SUMMED: Final = 1 << 18  # values summed at a time
ODD: Final = 0x1B873593CC9E2D51  # any large odd number
MOST_BITS: Final = 2000  # of an integer that `torch.load(weights_only=True)` reads


def is_scalar(value: object) -> bool:
    kind = type(value)
    if kind in (str, bytes) and len(value) > LONGEST:  # type: ignore[arg-type]
        return False
    return kind in SCALARS and not (kind is int and value.bit_length() > MOST_BITS) and value is not EMPTY  # type: ignore[attr-defined]


def same(first: object, second: object) -> bool:
    """True if two values have the same type and the same bits: NaN equals itself, 0.0 differs from -0.0.

    Other objects are compared by `==`, then by their attributes; objects without either by their pickles.
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return _same_tensors(first, second)  # type: ignore[arg-type]
    if isinstance(first, np.ndarray | np.generic):
        assert isinstance(second, np.ndarray | np.generic)
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        is_plain = not first.dtype.hasobject
        return first.tobytes() == second.tobytes() if is_plain else same(first.tolist(), second.tolist())
    if isinstance(first, Mapping):
        assert isinstance(second, Mapping)
        pairs = zip(first.items(), second.items(), strict=False)
        return len(first) == len(second) and all(same(a, b) for a, b in pairs)
    if isinstance(first, list | tuple):
        assert isinstance(second, list | tuple)
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) in SCALARS:
        return scalar_bits(first) == scalar_bits(second)
    return _same_objects(first, second)


def _same_objects(first: Any, second: Any) -> bool:
    if callable(getattr(type(first), "equals", None)):  # a table, whose `==` compares its elements
        return bool(first.equals(second))
    equality: Any = type(first).__eq__
    has_equality = equality is not object.__eq__
    try:
        if first == second:
            return True
    except (RuntimeError, TypeError, ValueError):  # tensors in them have no truth value
        has_equality = False
    state = object.__getstate__(first)  # its `__dict__` and slots
    if state:
        return same(state, object.__getstate__(second))
    return not has_equality and _pickled(first) == _pickled(second)


def _pickled(value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001  # any error of the user's `__reduce__`: assume equal
        return None


def scalar_bits(value: Any) -> bytes:
    return marshal.dumps(value, 2)  # version 2 writes binary floats and no references


def tensor_bytes(value: Tensor) -> memoryview:
    dense = value.detach()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).cpu()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(content: bytes | memoryview) -> str:
    return sha256(content).hexdigest()[:32]


def _same_tensors(first: Tensor, second: Tensor) -> bool:
    same_kind = (first.dtype, first.shape, first.layout) == (second.dtype, second.shape, second.layout)
    return same_kind and bool(tensor_bytes(first) == tensor_bytes(second))


def digest_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest(tensor_bytes(value))
    return digest(value.tobytes() if isinstance(value, np.ndarray) else scalar_bits(value))


def sums(tensors: Mapping[K, Tensor]) -> dict[K, int]:
    """Return a checksum of the bits of each tensor; synchronizes once with each device.

    It detects a change within one process; for files, use `digest_of`, which copies everything to the CPU.
    """
    by_device: dict[torch.device, list[K]] = {}
    for key, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(key)
    checksums: dict[K, int] = {}
    for device, keys in by_device.items():
        # Odd factors without a pattern: a changed value, or two swapped values, change the sum.
        numbers = torch.arange(1, SUMMED + 1, device=device) * ODD
        factors = (numbers ^ (numbers >> 29)) * ODD | 1
        checksums |= zip(keys, torch.stack([_sum(tensors[key], factors) for key in keys]).tolist(), strict=True)
    return checksums


def _sum(tensor: Tensor, factors: Tensor) -> Tensor:
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    # 8 bytes in two parts: a round float64 ends in 52 zero bits, and its products modulo 2**64 often collide.
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    bits = plain.reshape(-1).view(widths[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits, SUMMED):
        total = total * ODD + (part * factors[: len(part)]).sum()
    return total
