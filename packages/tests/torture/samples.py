"""The data of random programs, in every kind of loader; each augments with all three generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, sin
from typing import TYPE_CHECKING, Any

import heliograph as h
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

if TYPE_CHECKING:
    from heliograph.packages.tests.torture.program import Program

FEATURES, CLASSES = 5, 3
Sample = tuple[Tensor, int]
Transform = Callable[[int], float]


def draw() -> float:
    """Draw from every global generator, from two of them in a way that leaves a normal number cached."""
    return float(random.gauss(0, 1) + np.random.randn() + torch.rand(()).item())


class Samples(Dataset[Sample]):
    """Map-style. `transform` adds a number that depends on the index; it may hide something.

    Args:
        size: how many.
        poisoned: whose inputs are not numbers.
    """

    def __init__(self, size: int, poisoned: int | None = None) -> None:
        self.size, self.poisoned = size, poisoned
        self.transform: Transform | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        inputs = torch.tensor([sin(index * feature + 1) for feature in range(FEATURES)])
        inputs += torch.rand(FEATURES) / 10 + draw() / 20 + float(np.random.default_rng().random()) / 20
        if self.transform is not None:
            inputs += self.transform(index) / 2
        return (torch.full_like(inputs, torch.nan) if index == self.poisoned else inputs), index % CLASSES


class Stream(IterableDataset[Sample]):
    """Iterable, in an order that is drawn; workers share it."""

    def __init__(self, samples: Samples, *, shuffled: bool) -> None:
        self.samples, self.shuffled = samples, shuffled

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        own = list(range(len(self)) if worker is None else range(worker.id, len(self), worker.num_workers))
        if self.shuffled:
            random.shuffle(own)
        return (self.samples[index] for index in own)


class Reader:
    """No loader of torch's: yields batches."""

    def __init__(self, stream: Stream, batch_size: int) -> None:
        self.stream, self.batch_size = stream, batch_size

    def __iter__(self) -> Iterator[Any]:
        samples = list(self.stream)
        for start in range(0, len(samples), self.batch_size):
            yield default_collate(samples[start : start + self.batch_size])


class Cursor:
    """A loader that keeps its own position."""

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self.samples, self.batch_size, self.position, self.following = samples, batch_size, 0, 0

    def __len__(self) -> int:
        return ceil(len(self.samples) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.following = self.following, 0
        while self.position < len(self.samples):
            indices = range(self.position, min(self.position + self.batch_size, len(self.samples)))
            self.position += self.batch_size
            yield default_collate([self.samples[index] for index in indices])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.following = state["position"]


class Backwards:
    """A sampler that can be entered anywhere."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        return iter([(7 * epoch - place) % self.size for place in range(self.size)][start:])


class Draws:
    """A sampler of which nothing is known."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.size), self.size))


def sampler_of(program: Program) -> Any:
    """Return the sampler that a program's kind of data has, None where it has none."""
    size = program.samples
    if program.data == "weighted":
        return WeightedRandomSampler([1.0 + index % 3 for index in range(size)], size)
    if program.data == "subset":
        return SubsetRandomSampler(range(size))
    if program.data == "seekable":
        return Backwards(size)
    return Draws(size) if program.data == "foreign sampler" else None


def loading(
    program: Program, samples: Samples, sampler: Any, collate: Callable[[Sequence[Any]], Any]
) -> dict[str, Any]:
    """Return the training data of a program, and how to read it, as `fit` takes them."""
    kind, batch_size, shuffled = program.data, program.batch_size, program.shuffled
    workers = {"num_workers": program.workers, "persistent_workers": program.persistent}
    params: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate, **workers}
    order: dict[str, Any] = {"shuffle": shuffled} if sampler is None else {"sampler": sampler}
    stream = Stream(samples, shuffled=shuffled)
    if kind in ("map", "phases"):
        draws = {"draws_per": "sample"} if program.per_sample else {}
        train = samples if kind == "map" else h.Phases(samples, Samples(program.samples - 3))
        return {"train": train, "loader_params": {**params, **order, **draws}}
    if kind == "iterable":
        return {"train": DataLoader(stream, **params)}
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return {"train": StatefulDataLoader(samples, **params, **order)}
    if kind == "list":
        return {"train": _batches(program)}
    if kind in ("reader", "cursor"):
        return {"train": Reader(stream, batch_size) if kind == "reader" else Cursor(samples, batch_size)}
    return {"train": DataLoader(samples, **params, **order)}


def _batches(program: Program) -> list[tuple[Tensor, Tensor]]:
    """Return batches that are made ahead of the run."""
    inputs = torch.randn(program.samples, FEATURES, generator=torch.Generator().manual_seed(program.seed))
    targets = torch.arange(program.samples) % CLASSES
    batches = (torch.split(each, program.batch_size) for each in (inputs, targets))
    return list(zip(*batches, strict=True))
