"""One equality for values: the same types and the same bits."""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
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
SAMPLE: Final = 4096  # numbers of a tensor
VALUES: Final = (*SCALARS, np.generic)
NAMED: Final = (type, FunctionType, BuiltinFunctionType, ModuleType)


def is_scalar(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= MOST_BITS)
    if kind is str or kind is bytes:
        return len(value) <= LONGEST and value is not EMPTY
    return kind in SCALARS


def same(first: object, second: object) -> bool:
    """True if two values have the same type and the same bits: NaN equals itself, 0.0 differs from -0.0.

    Objects are compared by what they pickle; of an object that cannot be pickled, only the type is compared.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        pairs = zip(first.items(), second.items(), strict=False)
        return len(first) == len(second) and all(same(*pair) for pair in pairs)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) in SCALARS:  # many times as fast
        return scalar_bits(first) == scalar_bits(second)
    return first is second or leaves(first) == leaves(second)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a scalar, a tensor or an array. Leaves are equal if kind and digest are.

    Attributes:
        kind: type, dtype and shape, in words.
        digest: of all bits.
        sample: for messages: a number, a text, or numbers of a tensor (a sample of a large one); None if empty.
    """

    kind: str
    digest: str
    sample: Any = field(compare=False)

    def __str__(self) -> str:
        shown = self.kind if isinstance(self.sample, np.ndarray | NoneType) else repr(self.sample)
        return shown if len(shown) <= 60 else f"{shown[:60]}..."


def shortest(*numbers: float) -> list[str]:
    # the fewest digits that show a difference, at least four
    for digits in (4, 6, 9):
        texts = [f"{number:.{digits}g}" for number in numbers]
        if len(set(texts)) == len(texts):
            return texts
    return list(map(repr, numbers))


def leaves(value: Any) -> dict[str, Leaf]:
    """Return all values in a nested one by path, for example `model.0.weight`, `[1].label`."""
    return {path.lstrip("."): leaf for path, leaf in _walk(value, "", ())}


def scalar_bits(value: Any) -> bytes:
    return marshal.dumps(value, 2)  # version 2 writes binary floats and no references


def tensor_bytes(value: Tensor) -> memoryview:
    dense = value.detach()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).cpu()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest(content: bytes | memoryview) -> str:
    return sha256(content).hexdigest()[:32]


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


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, Tensor):
        yield path, _tensor_leaf(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        numbers = _numbers(value.reshape(-1)) if value.dtype.kind in "biuf" else None
        yield path, Leaf(f"{value.dtype} of shape {list(value.shape)}", digest(value.tobytes()), numbers)
    elif isinstance(value, VALUES):
        yield path, Leaf(type(value).__name__, digest(repr(value).encode()), value)
    elif isinstance(value, NAMED):
        name = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value.__name__
        yield path, Leaf("name", name, name)
    elif id(value) not in above:  # a value inside itself is walked once
        for key, part in _parts(value):
            yield from _walk(part, f"{path}{key}", (*above, id(value)))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    # the items of a container, or the pickled parts of another object
    if isinstance(value, Mapping):
        yield from ((f".{key}" if isinstance(key, str) else f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | np.ndarray | set | frozenset):
        parts = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield from ((f"[{index}]", part) for index, part in enumerate(parts))
    else:
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001  # of the user's method, or not picklable: only its type is compared
            reduced = type(value).__qualname__
        if isinstance(reduced, str):
            yield "", reduced
            return
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from (("()", [function, *arguments]), ("", state), ("[]", [*(items or ()), *(pairs or ())]))


def _tensor_leaf(value: Tensor) -> Leaf:
    dense = value.detach().cpu()
    dense = (dense if dense.layout is torch.strided else dense.to_dense()).flatten()
    numbers = torch.view_as_real(dense.resolve_conj()).flatten() if dense.is_complex() else dense
    kind = f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    return Leaf(kind, digest(tensor_bytes(dense)), _numbers(numbers))


def _numbers(flat: Any) -> Any:
    sample = flat[:: 1 + len(flat) // SAMPLE]
    is_tensor = isinstance(sample, Tensor)
    numbers = sample.to(torch.float64, copy=True).numpy() if is_tensor else sample.astype(np.float64)
    return numbers.item() if len(numbers) == 1 else numbers
