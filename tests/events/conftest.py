"""A real run, not entered: what the bus and the control are asked with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from heliograph import Trainer, TrainRun
from heliograph.events import Bus
from heliograph.tests.kit import make_run


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
