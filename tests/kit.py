"""What many tests train and look at: random batches, a small task, optimizers, trainings, the files of a folder."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from heliograph import (
    BatchEnd,
    Bus,
    Checkpoint,
    Event,
    Every,
    Lane,
    Plugin,
    RNGCapture,
    Run,
    RunResult,
    SaveSchedule,
    Supervised,
    Trainer,
    TrainRun,
    on,
)
from heliograph.events import CATALOGUE
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def random_batches(count: int = 5, size: int = 4, *, inputs: int = 4, outputs: int = 2, seed: int = 0) -> list[Batch]:
    """Return `count` batches of float32 inputs [size, inputs] and targets [size, outputs], the same every time."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, inputs, generator=generator), torch.randn(size, outputs, generator=generator))
        for _ in range(count)
    ]


def class_batches(count: int, size: int = 3) -> list[Batch]:
    """Return `count` batches of float32 inputs [size, 4] and classes [size], 0 or 1, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 4, generator=generator), torch.arange(size) % 2) for _ in range(count)]


def linear_classifier(**options: Any) -> Supervised:
    """Return a task for `class_batches` that begins with the same weights every time."""
    torch.manual_seed(0)
    return Supervised(nn.Linear(4, 2), nn.functional.cross_entropy, **options)


def dropout_task() -> Supervised:
    """Return a task for batches of 16 inputs and 1 target, with buffers and draws, that begins the same every time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    return Supervised(model, nn.functional.mse_loss)


def sgd(rate: float = 0.1, **options: Any) -> partial[torch.optim.SGD]:
    """Return a maker of optimizers that can be pickled."""
    return partial(torch.optim.SGD, lr=rate, **options)


def adam(rate: float = 0.01, **options: Any) -> partial[torch.optim.Adam]:
    """Return a maker of optimizers that can be pickled."""
    return partial(torch.optim.Adam, lr=rate, **options)


def fit(*plugins: Any, task: Any = None, train: Any = None, **options: Any) -> RunResult:
    """Train a `linear_classifier` on two `class_batches` for an epoch, or what else is said.

    Args:
        plugins: those of a new trainer; or a trainer, alone.
        task: what to train.
        train: the batches.
        options: further arguments of `Trainer.fit`; without steps= there is one epoch.
    """
    given = any(isinstance(each, Trainer) for each in plugins)
    (trainer,) = plugins if given else [Trainer(plugins, device="cpu")]
    options = {"optimizer": sgd(), **({} if "steps" in options else {"epochs": 1}), **options}
    return trainer.fit(
        linear_classifier() if task is None else task, class_batches(2) if train is None else train, **options
    )


def make_run(trainer: Trainer, batches: int = 3, epochs: int = 1, **options: Any) -> TrainRun:
    """Return a run of a `linear_classifier`, not entered."""
    return trainer.run(linear_classifier(), class_batches(batches), optimizer=sgd(), epochs=epochs, **options)


def go_through(run: TrainRun) -> TrainRun:
    """Train in a loop such as a user writes, and return the run, which can be looked at afterwards."""
    with run:
        for _ in run.epochs():
            for batch in run.batches():
                run.step(run.stepping.forward(run, batch))
    return run


def saving(folder: Path, every: Every, **options: Any) -> list[Plugin]:
    """Return the plugins of a training that can be resumed exactly; `options` are those of the `Checkpoint`."""
    return [RNGCapture(), SaveSchedule(every, at_end=False), Checkpoint(folder, **options)]


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the global generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


class Losses(Plugin):
    """Keeps every loss."""

    affects_training = False

    def __init__(self) -> None:
        self.values: list[float] = []

    @on(BatchEnd)
    def keep(self, run: Run, event: BatchEnd) -> None:
        self.values.append(run.loss.item())


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def counters(result: RunResult) -> dict[str, Any]:
    """Return what a run has counted, but for the time."""
    return {name: value for name, value in result.progress.state_dict().items() if "seconds" not in name}


def damage(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of the checkpoints in a folder."""
    return sorted(path.name for path in folder.glob("*.pth"))


def newest_log(folder: Path) -> Path:
    """Return the newest file of `JsonlLog(folder / "log.jsonl")`: a training that starts fresh has another."""
    return max(folder.glob("log*.jsonl"), key=lambda path: (len(path.name), path.name))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder of checkpoints, but for the proofs of the steps between them."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if not path.name.endswith((".steps", ".verified.jsonl"))
    }


class EventRecorder:
    """Records the events of a bus, in order.

    Args:
        bus: the bus to subscribe to.
        events: the event classes to record; by default the whole catalogue.
        lane: the lane of the handlers; `REPORT` runs after all others.

    Attributes:
        trace: the names of the events.
        events: the events.
    """

    def __init__(self, bus: Bus, events: Iterable[type[Event]] = CATALOGUE, *, lane: Lane = Lane.REPORT) -> None:
        self.trace: list[str] = []
        self.events: list[Event] = []
        self._handles = [bus.on(event, self._record, lane=lane) for event in events]

    def _record(self, run: Run, event: Event) -> None:
        self.trace.append(event.name)
        self.events.append(event)

    def stop(self) -> None:
        """Unsubscribe from the bus."""
        for handle in self._handles:
            handle.remove()
