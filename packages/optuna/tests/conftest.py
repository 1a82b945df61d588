"""Studies that say nothing."""

from __future__ import annotations

from collections.abc import Iterator

import optuna
import pytest
from heliograph.tests.builtin_callbacks.conftest import (
    _global_generators,
    batches,
    losses,
    scripted,
    sgd,
    task,
    weights,
)

__all__ = ["_global_generators", "batches", "losses", "scripted", "sgd", "task", "weights"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(verbosity)
