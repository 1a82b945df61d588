"""Two repetitions of a step, operator by operator: the first one whose outputs differ though its inputs do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from heliograph.spi import leaves, with_article
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VALUES = (int, float, complex, str, NoneType, torch.dtype, torch.layout, torch.memory_format)
UNWRITTEN = ("empty", "new_empty", "resize")  # operators whose outputs hold what was in the memory before


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator: its name, its arguments but for tensors, digests of the tensors in and out."""

    operator: str
    values: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """The first operator that differs.

    Attributes:
        text: in words.
        kind: the same words for the same operator with other values.
        comes_from_outside: whether no operator makes it.
    """

    text: str
    kind: str
    comes_from_outside: bool = False


class CallDigests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a digest of each call of an operator; each waits for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._unwritten: set[int] = set()  # memory that holds what was there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and keep what went in and came out."""
        given = [each for each in _tensors((args, kwargs or {})) if _memory(each) not in self._unwritten]
        inputs = _digests(given)
        result = func(*args, **kwargs or {})
        name, made = str(func), _tensors(result)
        if name.partition(".")[2].startswith(UNWRITTEN):
            self._unwritten.update(map(_memory, made))
        else:
            self._unwritten.difference_update(map(_memory, made))
            self.calls.append(Call(name, _values(func, args, kwargs or {}), inputs, _digests(made)))
        return result


def first_difference(act: Callable[[CallDigests], object]) -> OperatorDifference | None:
    """Act twice, each time in a context; return the first operator that differs, None for none."""
    traces = []
    for _ in range(2):
        digests = CallDigests()
        act(digests)
        traces.append(digests.calls)
    return difference_of(*traces)


def difference_of(calls: Sequence[Call], others: Sequence[Call]) -> OperatorDifference | None:
    """Return the first operator that differs, None for none."""
    for number, (one, other) in enumerate(zip(calls, others, strict=False), 1):
        if one.operator != other.operator:
            return _alike(f"operator {number} is {one.operator} in the first, and {other.operator} in the second")
        if one.values != other.values:
            first, second = next(pair for pair in zip(one.values, other.values, strict=True) if pair[0] != pair[1])
            given, values = f"operator {number}, {one.operator}, is given", f"{first} in the first, and {second}"
            return OperatorDifference(f"{given} {values} in the second", f"{given} other values", True)
        if one.inputs != other.inputs:
            text = f"the inputs of operator {number}, {one.operator}, which no operator before it has made"
            return OperatorDifference(text, text, True)
        if one.outputs != other.outputs:
            return _alike(f"the outputs of operator {number}, {one.operator}, whose inputs are equal")
    return None if len(calls) == len(others) else _alike("the number of operators")


def _alike(text: str) -> OperatorDifference:
    return OperatorDifference(text, text)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _values(operator: Any, given: Sequence[Any], named: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what an operator is given for each of its arguments: what is left out has its default."""
    values = [
        given[number] if number < len(given) else named.get(each.name, each.default_value)
        for number, each in enumerate(operator._schema.arguments)
    ]
    return tuple(map(_shown, values))


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, torch.device):
        return repr(value.type)
    if isinstance(value, Tensor):
        return "a Tensor"  # a parameter too: its bits are what counts
    return repr(value) if isinstance(value, VALUES) else with_article(type(value).__name__)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _digests(tensors: list[Tensor]) -> tuple[str, ...]:
    return tuple(leaf.digest for each in tensors for leaf in leaves(each).values())
