"""Finding state that a dataset or a sampler hides from the keys of its draws."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from .draws import isolated
from .keyed import KeyedBatch, KeyedDataset, KeyedIndex
from .orders import Order
from .sources import MapSource

BATCHES = 100  # of an order that are compared: their indices cost little, but an order may have no end


def hidden_state(source: MapSource, seed: int) -> list[str]:
    """Load the first batch of the first epoch twice, and draw its order twice; return a sentence for what differs.

    All of that on a copy, and with the same indices: a sampler's state does not look like the dataset's.
    """
    name = type(source.dataset.keyed_inner).__name__
    try:
        dataset, order, collate = deepcopy(  # at once: they may share generators
            (source.dataset, source.order, source.loader.collate_fn)
        )
    except Exception as error:  # noqa: BLE001  # what cannot be copied is not probed, and that is said
        return [f"{name} cannot be copied ({type(error).__name__}: {error}), so hidden state in it was not looked for"]
    with isolated():
        drawn, again = (_beginning(order, seed) for _ in range(2))
        loads = [_load(dataset, chosen, collate) for chosen in drawn[:1] * 2]
    sentences = []
    if not same(*(list(map(_indices, each)) for each in (drawn, again))):
        sentences.append(
            f"{_sampler_of(source)} gives another order each time it is asked: it holds state that no key reaches (a "
            f"counter, a hidden generator), so a resumed run reads other samples: let it go by its epoch (set_epoch), "
            f"or give it indices(seed, epoch, start)"
        )
    if loads and not same(*loads):
        sentences.append(
            f"{name} loads the same batch differently each time: it holds state that no key reaches (a counter, a "
            f"hidden generator, the clock, os.urandom)"
        )
    return sentences


def _beginning(order: Order, seed: int) -> list[KeyedBatch | KeyedIndex]:
    order.begin(seed, 0, 0)
    return list(islice(order, BATCHES))


def _indices(chosen: KeyedBatch | KeyedIndex) -> Any:
    return chosen.index if isinstance(chosen, KeyedIndex) else list(chosen)


def _load(dataset: KeyedDataset, chosen: KeyedBatch | KeyedIndex, collate: Callable[[Any], Any]) -> Any:
    return collate(dataset.__getitems__(chosen) if isinstance(chosen, KeyedBatch) else dataset[chosen])


def _sampler_of(source: MapSource) -> str:
    """Return the class of what decides the order: a batch sampler of the user's own, or the sampler in torch's."""
    batch_sampler = source.loader.batch_sampler
    own = source.loader.sampler if type(batch_sampler) in (BatchSampler, type(None)) else batch_sampler
    return type(own).__name__


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
