"""The attributes of data objects, which a resume compares and does not restore: they may be as large as the data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any, Final

from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ...events import Run
from ..data.draws.object_parts import set_by_epoch
from ..data.streams import Streams
from .graph import is_own
from .values import GENERATORS, encode

READERS: Final = ("dataset", "sampler", "batch_sampler", "collate_fn")


def encode_data(run: Run, *, only_by_epoch: bool = False) -> dict[str, dict[str, Any]]:
    """Return digests of the attributes of datasets, samplers and collate functions, by path.

    Args:
        run: the run.
        only_by_epoch: only those that `set_epoch` sets, and sets again before anything is read.
    """
    sets, train = run.validation_loaders, run.train_loader
    loaders = (
        {f"{name} ": loader for name, loader in train.loaders.items()} if isinstance(train, Streams) else {"": train}
    )
    loaders |= {f"validation {name} ".replace("  ", " "): loader for name, loader in sets.items()}
    found: dict[str, dict[str, Any]] = {}
    for prefix, loader in loaders.items():
        for name in READERS:
            reader = getattr(loader, name, None)
            if type(reader) is BatchSampler:  # torch makes one of the sampler
                reader = None if reader.sampler is loader.sampler else reader.sampler
            for path, value, follows_epoch in _attributes(reader, prefix + name.replace("_", " ")):
                if follows_epoch or not only_by_epoch:
                    found[path] = encode(value, is_data=True)
    return found


def _attributes(reader: Any, path: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield path and value of each attribute of a data object, in torch's wrappers too, and if it follows the epoch."""
    if isinstance(reader, Subset):
        yield f"{path}.indices", reader.indices if type(reader.indices) is list else list(reader.indices), False
        yield from _attributes(reader.dataset, path)
    elif isinstance(reader, ConcatDataset):
        for number, part in enumerate(reader.datasets):
            yield from _attributes(part, f"{path} {number}")
    elif isinstance(reader, TensorDataset):
        for number, tensor in enumerate(reader.tensors):
            yield f"{path}.tensors {number}", tensor, False
    elif isinstance(reader, WeightedRandomSampler | SubsetRandomSampler):
        name = "weights" if isinstance(reader, WeightedRandomSampler) else "indices"
        yield f"{path}.{name}", getattr(reader, name), False
    elif isinstance(reader, FunctionType | partial):
        yield path, reader, False
    elif reader is not None and is_own(type(reader)):
        by_epoch = set_by_epoch(type(reader))
        for name, value in getattr(reader, "__dict__", {}).items():
            if not isinstance(value, GENERATORS) and name[:2] != "__":  # their draws are keyed
                yield f"{path}.{name}", value, name in by_epoch
