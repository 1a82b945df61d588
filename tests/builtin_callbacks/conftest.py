"""Small models, small data, and global generators that every test leaves as it found them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from heliograph import BatchEnd, Run, Supervised, Task, Trainer
from heliograph.tests import kit
from heliograph.tests.kit import Batch, random_batches
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    with kit.kept_generators():
        torch.manual_seed(0)
        yield


@pytest.fixture
def batches() -> Callable[..., list[Batch]]:
    """Return a maker of lists of random batches of (inputs, targets)."""

    return random_batches


@pytest.fixture
def task() -> Callable[..., Supervised]:
    """Return a maker of tasks that all begin with the same weights."""

    def make(*, dropout: float = 0.0, seed: int = 0) -> Supervised:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = nn.Linear(4, 2)
        model: nn.Module = nn.Sequential(nn.Dropout(dropout), layer) if dropout else layer
        return Supervised(model, nn.functional.mse_loss)

    return make


class ScriptedTask(Task):
    """Trains a little; its validation and training losses are what the script says."""

    def __init__(self, values: Sequence[float], name: str) -> None:
        self.model = nn.Linear(4, 2)
        self.values = iter(values)
        self.name = name

    def training_step(self, run: Run, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, run: Run, batch: Any) -> dict[str, float]:
        return {self.name: next(self.values)}


@pytest.fixture
def scripted() -> Callable[..., Task]:
    """Return a maker of tasks with scripted validation values."""

    def make(values: Sequence[float], name: str = "loss") -> Task:
        return ScriptedTask(values, name)

    return make


@pytest.fixture
def weights() -> Callable[[Any], list[Tensor]]:
    """Return a function that copies a task's weights."""
    return lambda task: [each.detach().clone() for each in task.model.state_dict().values()]


@pytest.fixture
def losses() -> Callable[[Trainer], list[float]]:
    """Return a function that begins to record a trainer's losses into a list."""

    def record(trainer: Trainer) -> list[float]:
        seen: list[float] = []
        trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.loss.item()))
        return seen

    return record


@pytest.fixture
def sgd() -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return an optimizer with a state of its own."""
    return kit.sgd(momentum=0.9)
