"""Reading a loader from a position on, apart from the training's random stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..draws.generators import isolated
from ..draws.held_generators import BEGIN, Held
from ..loaders import shielded
from .contract import Reading

MASK = 2**63 - 1


def rewired(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other parts; the user's own stays as it is."""
    own = shielded(loader)
    own.__dict__.update(changes)  # a loader refuses to have its parts set
    own.generator = torch.Generator()  # what a worker is first seeded by is drawn from it
    return own


def begun(loader: Iterable[Any], reading: Reading, held: Held | None = None, rank: int = 0) -> Iterator[Any]:
    """Return an iterator; making it draws nothing from the training's random stream."""
    with isolated():
        if held is not None:
            held.seed(reading.seed, reading.epoch, rank, BEGIN)
        if isinstance(loader, DataLoader) and isinstance(loader.generator, torch.Generator) and held is None:
            loader.generator.manual_seed((reading.seed + reading.epoch) & MASK)
        return iter(loader)


def apart(
    batches: Iterator[Any], reading: Reading | None = None, held: Held | None = None, rank: int = 0, first: int = 0
) -> Iterator[Any]:
    """Read batches in this process without touching the training's random stream.

    Given a reading, each is read under its key; otherwise the dataset sees to that.
    """
    isolation = isolated()
    for batch in count(first):
        with isolation:
            if reading is not None and held is not None:
                held.seed(reading.seed, reading.epoch, rank, batch)
            try:
                loaded = next(batches)
            except StopIteration:
                return
        yield loaded


def read_again(batches: Iterator[Any], reading: Reading) -> Iterator[Any]:
    """Return batches from the position on, after reading those before it once more."""
    batch = None
    for done in range(reading.batch):
        reading.tell(done, reading.batch)
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError(
                f"The train loader ended after {done} batches of epoch {reading.epoch}, of which {reading.batch} had "
                f"been consumed when the checkpoint was written: resume with the data that it was written with."
            ) from None
    if reading.batch:
        reading.tell(reading.batch, reading.batch)
        if reading.check is not None:
            reading.check(batch)
    return batches
