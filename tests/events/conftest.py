"""A real run, not entered: what the bus and the control are asked with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heliograph import Supervised, Trainer, TrainRun
from heliograph.events import Bus
from heliograph.tests.kit import sgd
from torch import nn


def make_run(trainer: Trainer) -> TrainRun:
    data = [(torch.ones(2, 1), torch.zeros(2, 1))] * 3
    task = Supervised(nn.Linear(1, 1), nn.functional.mse_loss)
    return trainer.run(task, data, optimizer=sgd(0.01), epochs=1)


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(device="cpu")


@pytest.fixture
def run(trainer: Trainer) -> TrainRun:
    return make_run(trainer)


@pytest.fixture
def another_run(trainer: Trainer) -> Callable[[], TrainRun]:
    return lambda: make_run(trainer)


@pytest.fixture
def bus(run: TrainRun) -> Bus:
    return run.bus
