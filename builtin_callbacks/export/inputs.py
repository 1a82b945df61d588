"""The inputs of a module: how it is called with them, their batch dimension, and batches of another size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, cat

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(example: Any) -> Arguments:
    """Return the positional and the keyword arguments of a call.

    Args:
        example: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(example, Tensor):
        return (example,), {}
    if type(example) is tuple:
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise TypeError(
        f"example= is what the module is called with: a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments; got a {type(example).__name__}."
    )


def mapped(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """Return nested tuples, lists and dicts with each tensor replaced, and each other leaf by None."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, tuple | list):
        return _like(value, [mapped(each, act) for each in value])
    if isinstance(value, Mapping):
        return {name: mapped(each, act) for name, each in value.items()}
    return None


def changed(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Return nested tuples, lists and dicts with each tensor replaced; other leaves are as they were."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, tuple | list):
        return _like(value, [changed(each, act) for each in value])
    if isinstance(value, Mapping):
        return {name: changed(each, act) for name, each in value.items()}
    return value


def _like(value: Any, items: list[Any]) -> Any:
    """Return items as what they were in: a list, a tuple or a named tuple."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def copied(value: Any) -> Any:
    """Return the inputs on the CPU, apart from the graph and from what changes them later."""
    return changed(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def batch_size(arguments: Arguments) -> int:
    """Return the first dimension that all tensors of the inputs have.

    Raises:
        ValueError: there is none, or they differ.
    """
    sizes: set[int] = set()
    mapped(arguments, lambda tensor: sizes.add(tensor.shape[0]) if tensor.ndim else None)
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"The inputs have the first dimensions {sorted(sizes)}, so which one is the batch is not known: "
            f"dynamic=False exports these shapes, dynamic_shapes=... says which dimensions may change."
        )
    return sizes.pop()


def of_size(arguments: Arguments, size: int) -> Arguments:
    """Return inputs of another batch size, made of the same samples, again and again."""

    def fit(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return cat([tensor] * (size // len(tensor) + 1))[:size].contiguous()

    args, kwargs = changed(arguments, fit)
    return args, kwargs
