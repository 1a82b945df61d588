"""What it costs to compare: the row of a batch, attributes at a save of a ResNet-18, the probe, 10,000 checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from time import perf_counter, time
from timeit import timeit
from typing import Any, cast

import heliograph as h
import torch
from heliograph.builtin_callbacks.checkpoint.verify_resume import Owner, Ring, quick_writer
from heliograph.core.checkpoint.storage import read_manifest
from heliograph.core.context import RunContext
from heliograph.tests.stores import seal_as
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset

REPEATS = 20
CHECKPOINTS = 10_000
CALLS = 200_000
ROW_OF_BATCH, READING = "the row of a batch", "of which loss.item() alone"
ATTRIBUTES, BATCH = "attributes at a save of a ResNet-18", "one batch of 64 by the dataset itself"
PROBED, UNPROBED = "RNGCapture()", "RNGCapture(probe=False)"
EMPTY, FULL, AUTO = "an empty folder", "10,000 checkpoints in it", "10,000 checkpoints, resume='auto'"
Spent = dict[str, list[float]]


class Block(nn.Module):
    """Two convolutions, and what went in."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.second, self.second_norm = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        inner = self.relu(self.first_norm(self.first(images)))
        return cast("Tensor", self.relu(self.second_norm(self.second(inner)) + self.shortcut(images)))


def resnet18() -> nn.Module:
    """Return a network of 18 layers with 11.7 million weights, after He et al. 2015, arXiv:1512.03385."""
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    blocks = [Block(*each) for each in (*widths, (512, 512, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Clock(h.Plugin):
    """Times what is looked at, at the only save."""

    def __init__(self) -> None:
        self.spent: list[float] = []

    @h.on(h.SavePoint)
    def measure(self, run: h.Run, event: h.SavePoint) -> None:
        """Look at everything, again and again."""
        objects = cast("RunContext", run).checkpoints.objects
        assert objects is not None
        for _ in range(REPEATS):
            begin = perf_counter()
            objects.state_dict(cast("RunContext", run))
            self.spent.append((perf_counter() - begin) * 1e3)


def at_save(seed: int) -> Spent:
    """Return the milliseconds that the loop gives for attributes at a save."""
    torch.manual_seed(seed)
    task, clock = h.Supervised(resnet18(), cross_entropy), Clock()
    with TemporaryDirectory() as folder:
        trainer = h.Trainer([h.SaveSchedule(h.Every(steps=1)), h.Checkpoint(folder), clock], device="cpu")
        trainer.fit(task, [(torch.zeros(2, 3, 32, 32), torch.zeros(2).long())], optimizer=sgd_of, steps=1)
    return {ATTRIBUTES: clock.spent}


class RowClock(h.Plugin):
    """Times the row of the last batch, again and again, and the reading of its loss."""

    def __init__(self) -> None:
        self.spent: Spent = {ROW_OF_BATCH: [], READING: []}

    @h.on(h.BatchEnd)
    def measure(self, run: h.Run, event: h.BatchEnd) -> None:
        """Write the row."""
        loss = run.loss
        assert loss is not None
        with TemporaryDirectory() as name:
            ring = Ring.new(Path(name) / "steps", Owner(bytes(16), bytes(16)))
            write = quick_writer(run, ring)
            for _ in range(REPEATS):
                self.spent[ROW_OF_BATCH].append(timeit(lambda: write(run, event), number=CALLS) / CALLS * 1e6)
                self.spent[READING].append(timeit(loss.item, number=CALLS) / CALLS * 1e6)


def per_batch(seed: int) -> Spent:
    """Return the microseconds of the row of a batch, and of the reading of a loss, which is a part of it."""
    torch.manual_seed(seed)
    clock, task = RowClock(), h.Supervised(nn.Linear(16, 1), mse_loss)
    batches = [(torch.zeros(8, 16), torch.zeros(8, 1))]
    h.Trainer([clock], device="cpu").fit(task, batches, optimizer=sgd_of, epochs=1)
    return clock.spent


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Draws on every image, as an augmentation does."""

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.full((3, 32, 32), float(index)) + torch.randn(3, 32, 32)
        return image.flatten()[:16], image.flatten()[:1]


class Stop(h.Plugin):
    """Ends the run after the first batch."""

    @h.on(h.BatchEnd)
    def stop(self, run: h.Run, event: h.BatchEnd) -> None:
        """Ask for it."""
        run.control.stop("measured")


def starts(seed: int) -> Spent:
    """Return the milliseconds from `fit` to the end of the first batch, with the probe and without."""
    torch.manual_seed(seed)
    spent: Spent = {BATCH: [], PROBED: [], UNPROBED: []}
    images = Images()
    for _ in range(REPEATS):
        begin = perf_counter()
        torch.utils.data.default_collate([images[index] for index in range(64)])
        spent[BATCH].append((perf_counter() - begin) * 1e3)
        for name, capture in {PROBED: h.RNGCapture(), UNPROBED: h.RNGCapture(probe=False)}.items():
            loader = DataLoader(images, batch_size=64, shuffle=True)
            trainer = h.Trainer([capture, Stop()], device="cpu")
            task = h.Supervised(nn.Linear(16, 1), mse_loss)
            spent[name].append(_timed(lambda t=trainer, k=task, d=loader: t.fit(k, d, optimizer=sgd_of, epochs=1)))  # type: ignore[misc]
    return spent


def folders(seed: int) -> Spent:
    """Return the milliseconds of a run of one step, in an empty folder and in one of 10,000 checkpoints."""
    torch.manual_seed(seed)
    logging.disable(logging.WARNING)  # that the name is taken is said every time
    with TemporaryDirectory() as name:
        full = Path(name) / "full"
        _fit(full)
        _fill(full)
        return {
            EMPTY: [_timed(lambda n=number: _fit(Path(name) / f"empty{n}")) for number in range(3)],  # type: ignore[misc]
            FULL: [_timed(lambda: _fit(full)) for _ in range(3)],
            AUTO: [_timed(lambda: _fit(full, resume="auto")) for _ in range(3)],
        }


def sgd_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(parameters, 0.01)


def _fit(folder: Path, **options: Any) -> h.RunResult:
    checkpoint = h.Checkpoint(folder, keep_last=None, **options)
    trainer = h.Trainer([h.SaveSchedule(h.Every(steps=1)), Stop(), checkpoint], device="cpu")
    task = h.Supervised(nn.Linear(16, 1), mse_loss)
    return trainer.fit(task, [(torch.zeros(8, 16), torch.zeros(8, 1))] * 50, optimizer=sgd_of, epochs=1000)


def _fill(folder: Path) -> None:
    """Put 10,000 copies of the only checkpoint beside it, each with a manifest of its own, as if one run saved them."""
    path = next(folder.glob("*.pth"))
    entry = read_manifest(path)
    for number in range(2, CHECKPOINTS + 1):
        place = path.with_stem(f"{path.stem}-{number}")
        copy = replace(entry, path=place, sequence=number, name="", saved_at=time())
        copyfile(path, copy.path)
        seal_as(copy.path, copy)
        (folder / "run.last").write_text(f"{copy.path.name}\n")


def _timed(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return (perf_counter() - begin) * 1e3
