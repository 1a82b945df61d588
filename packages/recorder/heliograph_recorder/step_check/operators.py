"""Compares two repetitions of a step operator by operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from types import NoneType
from typing import Any, NamedTuple

import torch
from heliograph.spi import leaves, with_article
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VALUES = (int, float, complex, str, NoneType, torch.dtype, torch.layout, torch.memory_format)
UNWRITTEN = ("empty", "new_empty", "resize")  # operators whose outputs are uninitialized memory


class OperatorCall(NamedTuple):
    """A call of an operator: its arguments except tensors, and digests of the tensors in and out."""

    operator: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class CallDigests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a digest of each call of an operator; every call waits for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []
        self._unwritten: set[int] = set()  # addresses of uninitialized memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _digests(tensor for tensor in _tensors((args, kwargs)) if _address(tensor) not in self._unwritten)
        result = func(*args, **kwargs)
        name, outputs = str(func), _tensors(result)
        if name.partition(".")[2].startswith(UNWRITTEN):
            self._unwritten.update(map(_address, outputs))
        else:
            self._unwritten.difference_update(map(_address, outputs))
            texts = [_as_text(value) for value in args] + [f"{key}={_as_text(value)}" for key, value in kwargs.items()]
            self.calls.append(OperatorCall(name, tuple(texts), inputs, _digests(outputs)))
        return result


def difference_of(first_calls: Sequence[OperatorCall], second_calls: Sequence[OperatorCall]) -> str | None:
    """Return a description of the first operator that differs."""
    for number, (first, second) in enumerate(zip(first_calls, second_calls, strict=False), 1):
        name = f"operator {number}, {first.operator}"
        if first.operator != second.operator:
            return f"operator {number} is {first.operator} in the first, {second.operator} in the second"
        for value, other_value in zip_longest(first.arguments, second.arguments, fillvalue="the default"):
            if value != other_value:
                return f"{name}, is given other values: {value} in the first, {other_value} in the second"
        if first.inputs != second.inputs:
            return f"the inputs of {name}, which no earlier operator computed"
        if first.outputs != second.outputs:
            return f"the outputs of {name}, whose inputs are equal"
    return None if len(first_calls) == len(second_calls) else "the number of operators"


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _as_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_text, value))}]"
    if isinstance(value, Tensor):
        return "a Tensor"  # or a Parameter: only the bits matter
    return repr(value) if isinstance(value, VALUES) else with_article(type(value).__name__)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _digests(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(leaf.digest for tensor in tensors for leaf in leaves(tensor).values())
