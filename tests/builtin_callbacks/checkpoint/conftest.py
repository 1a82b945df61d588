"""Trainings that save, and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from heliograph import Checkpoint, Every, RunResult, SaveSchedule, Trainer
from heliograph.tests.stores import names, opened, state

__all__ = ["names", "opened", "state"]

Make = Callable[..., Any]


@pytest.fixture
def fit(task: Make, batches: Make, sgd: Any) -> Callable[..., RunResult]:
    """Return a function that trains 3 batches an epoch and saves after each epoch, or as often as `every` says."""

    def run(checkpoint: Checkpoint, *plugins: Any, every: Any = None, **options: Any) -> RunResult:
        trainer = Trainer([SaveSchedule(every or Every(epochs=1), at_end=False), *plugins, checkpoint], device="cpu")
        options = {"epochs": 2, "task": task(), **options}
        return trainer.fit(options.pop("task"), batches(3), optimizer=sgd, **options)

    return run
