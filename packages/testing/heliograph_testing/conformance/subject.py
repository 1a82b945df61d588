"""The plugin that is checked, and the short runs that it is checked in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from heliograph import EpochEnd, Lane, Plugin, Run, RunResult, Supervised, Trainer, on
from heliograph.spi import seed_all
from torch import Tensor, nn

MakePlugin = Callable[[], Any]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
BATCHES = 3


class Batches:
    """The batches of an epoch, made again each time: nothing here keeps one."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            yield torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 0])


class Requester(Plugin):
    """Requests everything, so that every event is emitted."""

    asks = ("validation", "save", "log", "stop", "scheduler")

    @on(EpochEnd, lane=Lane.TRANSFORM)
    def request(self, run: Run, event: EpochEnd) -> None:
        """Make all requests."""
        run.control.request_log("under test")
        run.control.request_validation("under test")
        run.control.request_save("under test")


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin that is checked.

    Attributes:
        make: returns a new plugin object.
        make_scheduler: returns the scheduler of the runs.
        old_states: a state of each older version of it.
        draws: whether it draws from the global generators on purpose.
    """

    make: MakePlugin
    make_scheduler: MakeScheduler
    old_states: Mapping[int, Mapping[str, Any]]
    draws: bool

    @property
    def title(self) -> str:
        """What to call it in an error."""
        plugin = self.make()
        name = getattr(plugin, "name", None)
        return f"Plugin {name!r}" if isinstance(name, str) else f"The plugin {type(plugin).__name__}"

    def trainer(self, *plugins: Any) -> Trainer:
        """Return a trainer with plugins, after one that requests everything."""
        return Trainer([Requester(), *plugins], device="cpu")

    def fit(self, trainer: Trainer, task: Supervised | None = None) -> RunResult:
        """Train a small model for two epochs of three batches, with a validation, from the same random state."""
        task = task or small_task()
        seed_all(0)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
        return trainer.fit(
            task,
            Batches(),
            validation=Batches(),
            optimizer=optimizer,
            scheduler=self.make_scheduler(optimizer),
            epochs=2,
        )


def name_of(trainer: Trainer, plugin: Any) -> str:
    """Return a plugin's name in a trainer."""
    return next(name for name in trainer.plugins.names() if trainer.plugins[name] is plugin)


def small_task() -> Supervised:
    """Return a task that begins with the same weights every time."""
    torch.manual_seed(0)
    return Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)
