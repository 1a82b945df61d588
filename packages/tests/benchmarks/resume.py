"""What it costs to be resumable: in every step, for every batch that is loaded, and at a resume far into an epoch."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import heliograph as h
import numpy as np
import torch
from heliograph.core.data.source import Reading
from heliograph.core.data.source_choice import source_of
from heliograph.packages.tests.benchmarks.harness import SIZE, batches_of, sgd, tiny_model
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS = 1_000  # in an epoch
EPOCHS = 3
ROUNDS = 5
LISTENED, AGAIN = "1 handler of BatchEnd", "1 handler, once more (control)"
KEPT, RESUMABLE = "that, RNGCapture and Checkpoint", "and a SaveSchedule"
UNCOMPARED, COMPARABLE = "all that, but no losses of the last batches", "the losses of the last batches"
PLAIN, KEYED = "DataLoader of tensors", "the same, read by a run"
DRAWING, KEYED_DRAWING = "DataLoader of what draws", "the same, read by a run, keyed"
MANY = 10**9
FRESH, DURING = "a fresh start", "a resume during the epoch"


class Stopwatch(h.Plugin):
    """Times whole epochs."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self._begin = 0.0

    @h.on(h.EpochStart, lane=h.Lane.REPORT)
    def start(self, run: h.Run, event: h.EpochStart) -> None:
        """Begin."""
        self._begin = perf_counter()

    @h.on(h.EpochEnd, lane=h.Lane.TRANSFORM)
    def stop(self, run: h.Run, event: h.EpochEnd) -> None:
        """Note the microseconds a step."""
        self.epochs.append((perf_counter() - self._begin) / STEPS * 1e6)

    @h.on(h.BatchEnd)
    def listen(self, run: h.Run, event: h.BatchEnd) -> None:
        """Do nothing."""


def per_step(seed: int) -> dict[str, list[float]]:
    """Return the microseconds a step of each round; a list of batches needs no loading."""
    torch.set_num_threads(1)
    batches, shuffle = batches_of(STEPS), random.Random(seed).shuffle
    spent: dict[str, list[float]] = {LISTENED: [], KEPT: [], RESUMABLE: [], UNCOMPARED: [], AGAIN: []}
    names = list(spent)
    for _ in range(ROUNDS):
        shuffle(names)
        for name in names:
            watch = Stopwatch()
            with TemporaryDirectory() as folder:
                trainer = h.Trainer([watch, *resumable(name, Path(folder))], device="cpu")
                trainer.fit(h.Supervised(tiny_model(), mse_loss), batches, optimizer=sgd, epochs=EPOCHS)
            spent[name].append(median(watch.epochs[1:]))
    return spent


class Asks(h.Plugin):
    """Would ask for a save, but at no batch."""

    asks = ("save",)

    @h.on(h.TrainEnd)
    def listen(self, run: h.Run, event: h.TrainEnd) -> None:
        """Do nothing."""


def resumable(name: str, folder: Path) -> list[h.Plugin]:
    """Return what makes a run resumable, with a save that is never due."""
    if name not in (KEPT, RESUMABLE, UNCOMPARED):
        return []
    schedule = Asks() if name == KEPT else h.SaveSchedule(h.Every(steps=10**9))
    plugins: list[h.Plugin] = [h.RNGCapture(), schedule, h.Checkpoint(folder)]
    return [*plugins, NoComparison()] if name == UNCOMPARED else plugins


class NoComparison(h.VerifyResume):
    """Keeps and compares nothing."""

    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        """Do nothing."""

    def exchange(self, run: h.Run, event: h.SavePoint) -> None:
        """Do nothing."""


class Data(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as one likes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([float(index % 7)])
        return value.expand(16), value


class Drawing(Dataset[Tensor]):
    """Samples that draw from python, NumPy and torch."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Tensor:
        noise: Tensor = np.random.rand() + torch.rand(1)
        return self.inputs[index] * random.random() + noise


class Clock:
    """Times the reading of whole epochs, in turns."""

    def __init__(self, loader: DataLoader[Any], *, keyed: bool) -> None:
        self.loader, self.epoch = loader, 0
        self.source = source_of(loader) if keyed else None

    def per_batch(self) -> float:
        """Read an epoch; return the microseconds a batch."""
        begin = perf_counter()
        for _ in self._batches():
            pass
        self.epoch += 1
        return (perf_counter() - begin) / len(self.loader) * 1e6

    def _batches(self) -> Iterator[Any]:
        if self.source is None:
            return iter(self.loader)
        return self.source.open(Reading(0, self.epoch, 0, True, lambda done, batches: None))


def per_batch(seed: int) -> dict[str, list[float]]:
    """Return the microseconds of loading a batch, in this process and with two workers: what draws, and what cannot."""
    torch.set_num_threads(1)
    shuffle = random.Random(seed).shuffle
    inputs = torch.randn(STEPS * SIZE, 16)
    kinds: dict[str, Dataset[Any]] = {PLAIN: TensorDataset(inputs), DRAWING: Drawing(inputs)}
    spent: dict[str, list[float]] = {}
    for workers in (0, 2):
        clocks = {
            f"{name}, {workers} workers": Clock(
                DataLoader(kinds[base], SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0),
                keyed=name != base,
            )
            for base, name in ((PLAIN, PLAIN), (PLAIN, KEYED), (DRAWING, DRAWING), (DRAWING, KEYED_DRAWING))
        }
        names = list(clocks)
        for index in range(ROUNDS + 1):
            shuffle(names)
            for name in names:
                value = clocks[name].per_batch()
                if index:  # the first epoch starts the workers
                    spent.setdefault(name, []).append(value)
    return spent


class Resumer(h.Plugin):
    """Resumes a state, if there is one, and ends the run with its first batch."""

    asks = ("stop",)

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        self.saved = saved
        self.first = 0.0

    @h.on(h.TrainStart)
    def resume(self, run: h.Run, event: h.TrainStart) -> None:
        """Resume."""
        if self.saved is not None:
            run.resume(self.saved)

    @h.on(h.BatchEnd)
    def stop(self, run: h.Run, event: h.BatchEnd) -> None:
        """Note the time of the first batch."""
        self.first = perf_counter()
        run.control.stop("it was the first batch")


def far_resume(seed: int) -> dict[str, list[float]]:
    """Return the milliseconds from `fit` to the end of the first batch, in an epoch of a thousand million samples."""
    torch.set_num_threads(1)
    shuffle = random.Random(seed).shuffle
    saved = during()
    variants: dict[str, Callable[[], float]] = {FRESH: lambda: first_batch(None), DURING: lambda: first_batch(saved)}
    spent: dict[str, list[float]] = {FRESH: [], DURING: []}
    names = list(variants)
    for index in range(ROUNDS + 1):
        shuffle(names)
        for name in names:
            value = variants[name]()
            if index:
                spent[name].append(value)
    return spent


def first_batch(saved: Mapping[str, Any] | None) -> float:
    """Fit until the first batch ends; return the milliseconds."""
    resumer = Resumer(saved)
    begin = perf_counter()
    fit_many([resumer])
    return (resumer.first - begin) * 1e3


def fit_many(plugins: list[h.Plugin]) -> h.RunResult:
    """Fit on very many samples."""
    trainer = h.Trainer([h.RNGCapture(), *plugins], device="cpu")
    params = h.LoaderParams(batch_size=SIZE, shuffle=True)
    task = h.Supervised(tiny_model(), mse_loss)
    return trainer.fit(task, Data(MANY), loader_params=params, optimizer=sgd, epochs=2)


def during() -> dict[str, Any]:
    """Return a state from the middle of the second epoch."""
    cuts: list[bytes] = []

    class Keeper(h.Plugin):
        @h.on(h.BatchEnd, lane=h.Lane.REPORT)
        def keep(self, run: h.Run, event: h.BatchEnd) -> None:
            file = io.BytesIO()
            torch.save(run.state_dict(), file)
            cuts.append(file.getvalue())

    fit_many([Keeper(), Resumer(None)])
    state: dict[str, Any] = torch.load(io.BytesIO(cuts[0]), weights_only=True)
    state["progress"] |= {"epoch": 1, "batch": MANY // SIZE // 2, "earlier_batches": MANY // SIZE}
    return state
