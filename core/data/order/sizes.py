"""Batches and loaders of any kind: how many samples, how many batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset


def batch_size(batch: Any) -> int:
    """Return the samples in a batch.

    They are the first dimension of the first tensor or array found in it; a list of numbers or texts has as many as it
    is long. All else is one sample: a tensor without dimensions, a number, a text.
    """
    kind = type(batch)
    if kind is tuple or kind is list:
        try:
            return batch[0].shape[0]  # type: ignore[no-any-return]  # a tensor, nearly always: spared the search
        except (AttributeError, IndexError, TypeError):
            pass
    while not isinstance(shape := getattr(batch, "shape", None), tuple):
        if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str | bytes | Number):
            batch = batch[0]
        elif isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        else:
            return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 1
    return int(shape[0]) if shape else 1


def size_counter(task: Any, counts: Callable[[Any], int] = batch_size) -> Callable[[Any], int]:
    """Return what counts the samples of a batch: `task.batch_size(batch)` if the task has it, else `counts`."""
    own = getattr(task, "batch_size", None)
    return own if callable(own) else counts


def length_of(loader: Iterable[Any] | None) -> int | None:
    """Return the number of batches of a loader, None where it does not say."""
    try:
        return len(loader)  # type: ignore[arg-type]  # asked, not assumed
    except TypeError:
        return None


def check_no_names(data: Any, split: str) -> None:
    """Raise TypeError where data are several by name: the names would be taken for batches."""
    if isinstance(data, Mapping):
        raise TypeError(
            f"The {split} loader is a {type(data).__name__} with the keys {sorted(map(str, data))[:5]}, and a loader "
            f"yields batches: give one of its values. Phases(...) trains on several, one after the other."
        )


def check_loader(loader: Any, split: str) -> None:
    """Raise TypeError unless a loader can be iterated, ValueError where it says that it is empty."""
    check_no_names(loader, split)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"The {split} loader must be an iterable of batches, got {type(loader).__name__}.")
    samples = hasattr(loader, "__len__") and not hasattr(loader, "__iter__")  # as other libraries' datasets
    if samples or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)):
        raise TypeError(
            f"The {split} loader is a dataset of samples: say how to batch it, loader_params={{'batch_size': 32}}, or "
            f"give a DataLoader."
        )
    if isinstance(loader, Tensor):
        raise TypeError(
            f"The {split} loader is a tensor, which holds no batches: give TensorDataset(inputs, targets) with "
            f"loader_params={{'batch_size': 32}}."
        )
    if length_of(loader) == 0:
        raise ValueError(f"The {split} loader is empty: it has no batch. Check its dataset, batch_size and drop_last.")
