"""Datasets that draw, and small trainings over them that report every batch, loss and weight."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from heliograph import (
    At,
    BatchEnd,
    Every,
    Lane,
    RNGCapture,
    Run,
    RunResult,
    SavePoint,
    SaveSchedule,
    Task,
    Trainer,
    TrainStart,
)
from heliograph.core.data.source import Reading, Source
from heliograph.core.data.source_choice import source_of
from heliograph.tests import kit
from heliograph.tests.kit import sgd
from numpy.random import mtrand
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

WIDTH = 7  # the index, and six draws


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    with kit.kept_generators():
        torch.manual_seed(0)
        yield


def draws() -> list[float]:
    """Draw from every generator, an odd number of normal numbers too."""
    python = random.random(), random.gauss(0, 1)
    numpy = np.random.rand(), np.random.randn(), np.random.default_rng().random()
    return [*python, *map(float, numpy), torch.rand(1, dtype=torch.float64).item()]


ASKED: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


class Drawing(Dataset[Tensor]):
    """A map-style dataset: each sample is its index and six draws."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    @property
    def asked(self) -> list[int]:
        """What was asked for in this process; not an attribute, which a resume would compare."""
        return ASKED.setdefault(self, [])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        return torch.tensor([index, *draws()], dtype=torch.float64)


class Flowing(IterableDataset[Tensor]):
    """An iterable dataset of the same samples, shared out among the workers."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.size, step):
            yield torch.tensor([index, *draws()], dtype=torch.float64)


class SizedFlowing(Flowing):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.size


def stack_and_draw(samples: list[Tensor]) -> Tensor:
    """A collate function that draws too."""
    return torch.stack([*samples, torch.tensor([-1, *draws()], dtype=torch.float64)])


class Noisy(Task):
    """A task whose step draws from every generator: were the stream touched, its losses would show it."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, 1)).double()

    def training_step(self, run: Run, batch: Tensor) -> Tensor:
        noise = random.random() + np.random.randn() + torch.rand(1, dtype=torch.float64)
        loss: Tensor = (self.model(batch.reshape(-1, WIDTH) / 10 + noise) ** 2).mean()
        return loss

    def validation_step(self, run: Run, batch: Tensor) -> Tensor:
        return self.training_step(run, batch)

    test_step = validation_step


@dataclass(frozen=True)
class Trial:
    """What a training did."""

    batches: list[Any]
    losses: list[float]
    weights: list[Any]
    result: RunResult
    cuts: dict[int, Any]
    places: dict[tuple[int, int], Any]

    def is_tail_of(self, whole: Trial) -> bool:
        """Whether a resumed training continued as another one did that was left alone, to the last bit."""
        count = len(self.batches)
        assert 0 < count < len(whole.batches)
        same_batches, same_losses = self.batches == whole.batches[-count:], self.losses == whole.losses[-count:]
        return same_batches and same_losses and self.weights == whole.weights


def listed(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, Tensor) else batch


def fitted(
    data: Any,
    *,
    saved: Mapping[str, Any] | None = None,
    cut_at: Collection[int] = (),
    cut_everywhere: bool = False,
    plugins: Iterable[Any] = (),
    seed: int | None = 5,
    device: str = "cpu",
    **options: Any,
) -> Trial:
    """Train for two epochs; without a seed, nothing captures the random generators."""
    kept: dict[int, Any] = {}
    places: dict[tuple[int, int], Any] = {}
    batches: list[Any] = []
    losses: list[float] = []
    capture = [] if seed is None else [RNGCapture(seed)]
    saves = [SaveSchedule(At(steps=sorted(cut_at)), at_end=False)] if cut_at else []
    saves += [SaveSchedule(Every(steps=1)), SaveSchedule(Every(epochs=1)).named("epochs")] * cut_everywhere
    trainer = Trainer([*capture, *saves, *plugins], device=device)

    def note(run: Run, event: BatchEnd) -> None:
        batches.append(listed(run.batch))
        losses.append(run.loss.item())

    def keep(run: Run, event: SavePoint) -> None:
        cut = deepcopy(run.state_dict())
        kept.setdefault(run.progress.steps, cut)
        places[run.progress.epoch, run.progress.batch] = cut

    trainer.bus.on(BatchEnd, note)
    trainer.bus.on(SavePoint, keep, lane=Lane.PERSIST)
    if saved is not None:
        trainer.bus.on(TrainStart, lambda run, event: run.resume(deepcopy(saved)))
    task = Noisy()
    options = {"epochs": 2, "optimizer": sgd(0.01, momentum=0.9), **options}
    result = trainer.fit(task, data, **options)
    return Trial(batches, losses, [each.tolist() for each in task.model.state_dict().values()], result, kept, places)


def opened(source: Source, epoch: int = 0, batch: int = 0, *, seed: int = 5, apart: bool = True) -> Iterator[Any]:
    return source.open(Reading(seed, epoch, batch, apart, lambda done, batches: None))


def everything(loader: Any, epochs: Iterable[int] = (0, 1), **options: Any) -> list[Any]:
    """Read epochs of a loader as a run would; return all batches as lists."""
    source = source_of(loader, per_sample=options.pop("per_sample", False))
    try:
        return [listed(batch) for epoch in epochs for batch in opened(source, epoch, **options)]
    finally:
        source.close()


def stream() -> tuple[Any, ...]:
    """Return the state of the training's random stream, comparable."""
    numpy = np.random.get_state(legacy=False)
    bits = mtrand.get_bit_generator()
    assert isinstance(numpy, dict)
    words = numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"]
    return random.getstate(), id(bits), words, torch.get_rng_state().tolist()


@pytest.fixture
def drawing() -> type[Drawing]:
    return Drawing


@pytest.fixture
def flowing() -> type[Flowing]:
    return Flowing


@pytest.fixture
def sized_flowing() -> type[SizedFlowing]:
    return SizedFlowing


@pytest.fixture
def collate() -> Callable[[list[Tensor]], Tensor]:
    return stack_and_draw


@pytest.fixture
def fit() -> Callable[..., Trial]:
    return fitted


@pytest.fixture
def noisy() -> type[Noisy]:
    return Noisy


@pytest.fixture
def read() -> Callable[..., list[Any]]:
    return everything


@pytest.fixture
def reading() -> Callable[..., Iterator[Any]]:
    return opened


@pytest.fixture
def training_stream() -> Callable[[], tuple[Any, ...]]:
    return stream
