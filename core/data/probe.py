"""Finding state that a dataset hides from the keys of its draws."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .draws import isolated
from .keyed import KeyedDataset
from .orders import Order
from .sources import MapSource


def hidden_state(source: MapSource, seed: int) -> list[str]:
    """Load the first batch of the first epoch twice, on a copy of the dataset; return a sentence where they differ."""
    name = type(source.dataset.keyed_inner).__name__
    try:
        copy = deepcopy((source.dataset, source.order, source.loader.collate_fn))  # at once: they may share generators
    except Exception as error:  # noqa: BLE001  # what cannot be copied is not probed, and that is said
        return [f"{name} cannot be copied ({type(error).__name__}: {error}), so hidden state in it was not looked for"]
    one, other = (_first_batch(*copy, seed) for _ in range(2))
    if same(one, other):
        return []
    return [
        f"{name} loads the same batch differently each time: it holds state that no key reaches (a counter, a hidden "
        f"generator, the clock, os.urandom)"
    ]


def _first_batch(dataset: KeyedDataset, order: Order, collate: Callable[[Any], Any], seed: int) -> Any:
    with isolated():
        order.begin(seed, 0, 0)
        chosen = next(iter(order))
        samples = dataset.__getitems__(chosen) if isinstance(chosen, list) else dataset[chosen]
        return collate(samples)


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
    try:
        equal = bool(one == other) or (one != one and other != other)
    except (RuntimeError, TypeError, ValueError):  # an equality of tensors within, that is neither true nor false
        equal = False
    own = getattr(one, "__dict__", None)
    return equal or (bool(own) and type(one) is type(other) and same(own, vars(other)))


def _bits(value: Tensor) -> tuple[Any, ...]:
    dense = value.detach().cpu().to_dense().contiguous()
    return value.dtype, tuple(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
