"""State in what stands between a dataset and the training: samplers, collate functions, workers, validation data."""

from __future__ import annotations

from collections.abc import Iterator
from math import sin
from typing import Any, ClassVar

import heliograph as h
from heliograph.packages.tests.torture.hidden import LOADED, Hidden, Kind
from heliograph.packages.tests.torture.parts import Parts
from heliograph.packages.tests.torture.samples import Backwards, Samples
from torch.utils.data import DataLoader, default_collate


class Turning(Backwards):
    """Begins elsewhere each time."""

    turns = 0

    def indices(self, seed: int, epoch: int, start: int) -> Iterator[int]:
        self.turns += 1
        return iter([(place + 5 * self.turns) % self.size for place in range(self.size)][start:])


class MutatedSampler(Hidden):
    """A sampler that changes itself."""

    row, place = "E3", "sampler"
    data: ClassVar[tuple[Kind, ...]] = ("seekable",)

    def hide(self, parts: Parts) -> None:
        parts.sampler = Turning(parts.program.samples)


class Weighs(h.Plugin):
    """Raises the weight of what is hard, it says."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    @h.on(h.StepEnd)
    def weigh(self, run: h.Run, event: h.StepEnd) -> None:
        self.sampler.weights[run.progress.steps % len(self.sampler.weights)] *= 4


class MutatedWeights(Hidden):
    """A sampler's weights that a plugin changes."""

    row, place = "E3", "sampler"
    data: ClassVar[tuple[Kind, ...]] = ("weighted",)

    def hide(self, parts: Parts) -> None:
        parts.plugins["weighs"] = Weighs(parts.sampler)


class Picks(h.Plugin):
    """Puts one sample in the place of another."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        sampler.indices = list(sampler.indices)

    @h.on(h.EpochEnd)
    def pick(self, run: h.Run, event: h.EpochEnd) -> None:
        self.sampler.indices[event.epoch] = self.sampler.indices[-1]


class MutatedSubset(Hidden):
    """A sampler's indices that a plugin changes."""

    row, place = "E3", "sampler"
    data: ClassVar[tuple[Kind, ...]] = ("subset",)
    wants: ClassVar[dict[str, Any]] = {"epochs": 4, "steps": None}

    def hide(self, parts: Parts) -> None:
        parts.plugins["picks"] = Picks(parts.sampler)


class ByEpoch:
    """A transform that goes by an epoch that somebody sets."""

    epoch = 0

    def __call__(self, index: int) -> float:
        return sin(index + self.epoch)


class SetsEpoch(h.Plugin):
    """Sets the epoch of a transform."""

    def __init__(self, transform: ByEpoch) -> None:
        self.transform = transform

    @h.on(h.EpochStart)
    def set(self, run: h.Run, event: h.EpochStart) -> None:
        self.transform.epoch = event.epoch


class EpochInWorkers(Hidden):
    """An epoch that a plugin sets on a dataset, in persistent workers."""

    row, place = "E3", "dataset"
    data: ClassVar[tuple[Kind, ...]] = ("loader", "map")
    wants: ClassVar[dict[str, Any]] = {"workers": 2, "persistent": True, "epochs": 3, "steps": None}

    def hide(self, parts: Parts) -> None:
        transform = ByEpoch()
        parts.samples.transform = transform
        parts.plugins["sets_epoch"] = SetsEpoch(transform)


class SetEpoch(Samples):
    """A dataset that is given the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs + sin(index + self.epoch), target


class StreamInWorkers(Hidden):
    """An iterable dataset that goes by set_epoch, in persistent workers."""

    row, place = "E5", "dataset"
    data: ClassVar[tuple[Kind, ...]] = ("iterable",)
    wants: ClassVar[dict[str, Any]] = {"workers": 2, "persistent": True, "epochs": 3, "steps": None}

    def hide(self, parts: Parts) -> None:
        parts.samples = SetEpoch(parts.program.samples)


class Collates:
    """A collate function that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        inputs, targets = default_collate(samples)
        return inputs + sin(self.calls), targets


class StateOfCollate(Hidden):
    """A collate function that counts."""

    row, place = "own", "collate"
    data: ClassVar[tuple[Kind, ...]] = LOADED

    def hide(self, parts: Parts) -> None:
        parts.collate = Collates()


class CountsValidation(Samples):
    """Goes by how often it was read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = super().__getitem__(index)
        return inputs + sin(self.reads), target


class StateOfValidation(Hidden):
    """A validation set that counts its reads."""

    row, place = "own", "validation"
    wants: ClassVar[dict[str, Any]] = {"validate": ("batches", 3), "scheduler": "ReduceLROnPlateau"}

    def hide(self, parts: Parts) -> None:
        parts.validation = DataLoader(CountsValidation(5), 2)
