"""How long the loop waits for a save: of 400 MB in the background, and of a small model, beside one by hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import heliograph as h
import torch
from heliograph.packages.tests.benchmarks.harness import EPOCH, batches_of, sgd, tiny_model
from heliograph.packages.tests.benchmarks.usual import LOG, PATIENCE, write_synced
from heliograph.packages.tests.benchmarks.usual import SAVE as VALIDATED
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

TENSORS, FLOATS = 40, 2_500_000  # 400 MB
SAVES = 8
FIRST, LATER, COPY, SAVE = (
    "the first save",
    "later saves",
    "a copy into kept, touched buffers",
    "torch.save, no sync",
)
SMALL_SAVES = 200
BETWEEN = 5  # steps, as a training has: a save right after another finds all that it needs in the processor's cache
SYNCED, USUAL, EXACT = "by hand, file and folder synced", "the usual set", "the usual set, exact"
BACKGROUND = "the usual set, background=True"


class Large(h.Task):
    """Trains a little of a model that is large."""

    def __init__(self) -> None:
        self.model = nn.Linear(16, 1)
        self.rest = nn.ParameterList([nn.Parameter(torch.full((FLOATS,), float(index))) for index in range(TENSORS)])

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        """Return the loss."""
        inputs, targets = batch
        return mse_loss(self.model(inputs), targets)


class Saves(h.Plugin):
    """Asks for a save when the former is written, times how long the loop waits, and does the same by hand between."""

    affects_training = False  # else each save compares the tensors that it holds
    asks = ("save", "stop")

    def __init__(self, folder: Path, tensors: list[Tensor]) -> None:
        self.spent: dict[str, list[float]] = {FIRST: [], LATER: [], COPY: [], SAVE: []}
        self._folder, self._tensors = folder, tensors
        self._kept = [torch.zeros_like(each) for each in tensors]
        self._steps = self._begin = 0.0
        self._written = True

    @h.on(h.BatchEnd)
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        """Work by hand, then ask for the next save."""
        if not self._written or run.progress.steps < 3:
            return
        if len(self.spent[LATER]) == SAVES:
            run.control.stop("enough")
            return
        self._by_hand()
        self._written = False
        run.control.request_save("the next one")

    @h.on(h.SavePoint, lane=h.Lane.TRANSFORM)
    def start(self, run: h.Run, event: h.SavePoint) -> None:
        """Start the clock."""
        self._begin = perf_counter()

    @h.on(h.SavePoint, lane=h.Lane.REPORT)
    def stop(self, run: h.Run, event: h.SavePoint) -> None:
        """Note the milliseconds."""
        spent = (perf_counter() - self._begin) * 1e3
        self.spent[LATER if self.spent[FIRST] else FIRST].append(spent)

    @h.on(h.CheckpointSaved)
    def note(self, run: h.Run, event: h.CheckpointSaved) -> None:
        """Note that the save has been written."""
        self._written = True

    def _by_hand(self) -> None:
        begin = perf_counter()
        with torch.no_grad():
            for kept, tensor in zip(self._kept, self._tensors, strict=True):
                kept.copy_(tensor)
        copied = perf_counter()
        torch.save(self._tensors, self._folder / "by_hand.pt")
        self.spent[COPY].append((copied - begin) * 1e3)
        self.spent[SAVE].append((perf_counter() - copied) * 1e3)


class SmallSaves(h.Plugin):
    """Asks for saves, times each, and saves by hand in between."""

    affects_training = False
    asks = ("save", "stop")

    def __init__(self, folder: Path, spent: dict[str, list[float]], name: str) -> None:
        self._folder, self._spent, self._name = folder, spent, name
        self._begin = perf_counter()

    @h.on(h.BatchEnd, when=h.Every(steps=BETWEEN))
    def ask(self, run: h.Run, event: h.BatchEnd) -> None:
        """Save by hand, then ask for a save; stop when there are enough."""
        if len(self._spent[self._name]) == SMALL_SAVES:
            run.control.stop("enough")
            return
        state = {"model": run.task.model.state_dict(), "step": run.progress.steps}
        begin = perf_counter()
        state["optimizer"] = next(iter(run.optimizers.values())).state_dict()
        write_synced(self._folder / "by_hand.pt", state)
        self._spent[SYNCED].append((perf_counter() - begin) * 1e3)
        run.control.request_save("the next one")

    @h.on(h.SavePoint, lane=h.Lane.TRANSFORM)
    def start(self, run: h.Run, event: h.SavePoint) -> None:
        """Start the clock."""
        self._begin = perf_counter()

    @h.on(h.SavePoint, lane=h.Lane.REPORT)
    def stop(self, run: h.Run, event: h.SavePoint) -> None:
        """Note the milliseconds."""
        self._spent[self._name].append((perf_counter() - self._begin) * 1e3)


def endless() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield small batches."""
    while True:
        yield torch.ones(8, 16), torch.ones(8, 1)


class Endless:
    """A loader that never ends."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return endless()


def stalls(seed: int) -> dict[str, list[float]]:
    """Return the milliseconds that the loop stood still."""
    torch.manual_seed(seed)
    task = Large()
    with TemporaryDirectory() as name:
        folder = Path(name)
        saves = Saves(folder, list(task.rest))
        trainer = h.Trainer([saves, h.Checkpoint(folder / "checkpoints", background=True)], device="cpu")
        trainer.fit(task, Endless(), optimizer=torch.optim.SGD(task.model.parameters(), lr=0.01), steps=10**9)
    return saves.spent


def small(seed: int) -> dict[str, list[float]]:
    """Return the milliseconds of each save of a small model, by hand and by us, in turn on the same disk."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    batches = batches_of(EPOCH)
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(batches[0][0]), shuffle=True)
    spent: dict[str, list[float]] = {SYNCED: [], USUAL: [], EXACT: [], BACKGROUND: []}
    with Path(os.devnull).open("w") as quiet:
        for name in (USUAL, EXACT, BACKGROUND):
            gc.collect()
            with TemporaryDirectory() as folder:
                options: dict[str, Any] = {"background": name == BACKGROUND}
                options |= {"resume": "auto"} if name == EXACT else {}
                plugins = [
                    *([h.RNGCapture()] if name == EXACT else []),
                    h.ProgressBar(plain=False, file=quiet),
                    h.LogSchedule(h.Every(steps=LOG)),
                    h.TensorBoard(folder),
                    h.EarlyStopping(patience=PATIENCE),
                    h.ValidationSchedule(h.Every(steps=VALIDATED)),
                    h.Checkpoint(Path(folder) / "checkpoints", **options),
                    SmallSaves(Path(folder), spent, name),
                ]
                data = loader if name == EXACT else batches
                task = h.Supervised(tiny_model(), mse_loss)
                h.Trainer(plugins, device="cpu").fit(task, data, validation=batches[:10], optimizer=sgd, epochs=1)
    return spent
