"""How long the loop waits for a save of 400 MB, beside a plain copy of the tensors and beside `torch.save`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import heliograph as h
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

TENSORS, FLOATS = 40, 2_500_000  # 400 MB
SAVES = 8
FIRST, LATER, COPY, SAVE = "the first save", "later saves", "a copy into kept, touched buffers", "torch.save, no sync"


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
