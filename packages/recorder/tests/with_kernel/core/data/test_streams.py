"""Trainings on several streams: what a user gives and gets, and resumes from every step, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heliograph as h
import numpy as np
import pytest
import torch
from heliograph.tests import kit
from heliograph.tests.kit import sgd
from heliograph_recorder import Recorder, replay
from torch import Tensor, nn
from torch.utils.data import Dataset

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata with torch 2.13


class Samples(Dataset[Tensor]):
    """Samples that draw."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.first + index, random.random(), np.random.rand(), torch.rand(()).item()])


class Two(h.Task):
    """A model with dropout, trained on whatever streams there are."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        parts = [batch] if isinstance(batch, Tensor) else [part for part in batch.values() if part is not None]
        loss: Tensor = torch.stack([self.model(part / 10).square().mean() for part in parts]).sum()
        return loss + random.random() * loss.detach()

    def validation_step(self, run: h.Run, batch: Tensor) -> Tensor:
        return self.model(batch / 10).square().mean()  # type: ignore[no-any-return]  # a module returns Any


@dataclass
class Trial:
    """What a training did, batch by batch, and what it saved after each."""

    seen: list[Any]
    losses: list[float]
    weights: list[Any]
    result: h.RunResult
    cuts: dict[tuple[int, int], Any]

    @property
    def counts(self) -> dict[str, Any]:
        return kit.counters(self.result)


def named(run: h.Run) -> dict[str, Any]:
    of_one = isinstance(run.batch, Tensor)
    parts = {run.stream or "": run.batch} if of_one else run.batch
    return {name: None if part is None else part.tolist() for name, part in parts.items()}


def fitted(train: Any, *plugins: Any, saved: Any = None, **options: Any) -> Trial:
    seen: list[Any] = []
    losses: list[float] = []
    cuts: dict[tuple[int, int], Any] = {}
    each = [h.SaveSchedule(h.Every(batches=1), at_end=False), h.SaveSchedule(h.Every(epochs=1)).named("epochs")]
    trainer = h.Trainer([h.RNGCapture(6691), *plugins, *each], device="cpu")

    def note(run: h.Run, event: h.BatchEnd) -> None:
        seen.append(named(run))
        losses.append(run.loss.item())

    def keep(run: h.Run, event: h.SavePoint) -> None:
        cuts[run.progress.epoch, run.progress.batch] = deepcopy(run.state_dict())

    trainer.bus.on(h.BatchEnd, note)
    trainer.bus.on(h.SavePoint, keep, lane=h.Lane.PERSIST)
    if saved is not None:
        trainer.bus.on(h.TrainStart, lambda run, event: run.resume(deepcopy(saved)))
    task = options.pop("task", None) or Two()
    given: dict[str, Any] = {"optimizer": sgd(0.01, momentum=0.9), "epochs": 2} | options
    result = trainer.fit(task, train, **given)
    weights = [each.tolist() for each in task.model.state_dict().values()]
    return Trial(seen, losses, weights, result, cuts)


LOADING: dict[str, Any] = {"batch_size": 2, "shuffle": True}


def test_a_replay_says_that_streams_are_not_recorded(tmp_path: Path) -> None:
    class Asks(h.Plugin):
        def __init__(self, ask: Callable[[h.Run], Any]) -> None:
            self.ask = ask
            self.errors = list[str]()

        @h.on(h.BatchEnd)
        def try_it(self, run: h.Run, event: h.BatchEnd) -> None:
            try:
                self.ask(run)
            except h.NotRecorded as error:
                self.errors.append(str(error))

    fitted({"a": Samples(4), "b": Samples(4)}, Recorder(tmp_path), loader_params=LOADING)
    counts, stream = Asks(lambda run: run.progress.streams["a"]), Asks(lambda run: run.stream)
    replay(tmp_path, [counts, stream.named("stream")])
    assert counts.errors == ["A recording does not hold how many batches of each stream were read."] * 4
    assert stream.errors == ["A recording does not hold which of several streams a batch is of."] * 4
