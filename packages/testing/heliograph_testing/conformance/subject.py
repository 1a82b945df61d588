"""The plugin under test, the short trainings of a check, and the form of a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from heliograph import EpochEnd, Lane, Plugin, Run, RunResult, Supervised, Trainer, TrainStart, on
from heliograph.core.objects.program import show_both
from heliograph.spi import describe_error, differing, encode, seed_all
from torch import Tensor, nn

MakePlugin = Callable[[], Any]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
BATCHES = 3


class CrashError(Exception):
    pass


class RuleBatches:
    """The batches of an epoch; each iteration creates new ones."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(BATCHES):
            yield torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 0])


class Requester(Plugin):
    """Makes all requests so that every event is emitted."""

    asks = ("validation", "save", "log", "stop", "scheduler")

    @on(EpochEnd, lane=Lane.TRANSFORM)
    def request(self, run: Run, event: EpochEnd) -> None:
        run.control.request_log("under test")
        run.control.request_validation("under test")
        run.control.request_save("under test")


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin under test.

    Attributes:
        make: returns a new plugin object.
        make_scheduler: returns the scheduler of the trainings.
        old_states: a state of each older version.
        draws: whether the plugin draws from the global random generators on purpose.
    """

    make: MakePlugin
    make_scheduler: MakeScheduler
    old_states: Mapping[int, Mapping[str, Any]]
    draws: bool

    @property
    def title(self) -> str:
        plugin = self.make()
        name = getattr(plugin, "name", None)
        return f"Plugin {name!r}" if isinstance(name, str) else f"The plugin {type(plugin).__name__}"

    def trainer(self, *plugins: Any) -> Trainer:
        return Trainer([Requester(), *plugins], device="cpu")

    def fit(self, trainer: Trainer, task: Supervised | None = None) -> RunResult:
        task = task or small_task()
        seed_all(0)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.01)
        return trainer.fit(
            task,
            RuleBatches(),
            validation=RuleBatches(),
            optimizer=optimizer,
            scheduler=self.make_scheduler(optimizer),
            epochs=2,
        )


def name_of(trainer: Trainer, plugin: Any) -> str:
    return next(name for name in trainer.plugins.names() if trainer.plugins[name] is plugin)


def resume_from(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Let the next training continue from a state."""

    def resume(run: Run, event: TrainStart) -> None:
        run.resume(saved)

    trainer.bus.on(TrainStart, resume)


def small_task() -> Supervised:
    torch.manual_seed(0)
    return Supervised(nn.Linear(4, 2), nn.functional.cross_entropy)


@dataclass(frozen=True, slots=True)
class ConformanceRule:
    """A rule for plugins.

    Attributes:
        name: the name of the rule.
        sentence: what it demands.
        fix: how to fix a plugin that breaks it.
        check: raises AssertionError if a plugin breaks it.
    """

    name: str
    sentence: str
    fix: str
    check: Callable[[Subject], None]

    def apply(self, subject: Subject) -> None:
        try:
            self.check(subject)
        except Exception as error:
            problem = str(error) if isinstance(error, AssertionError) else f"It raised {describe_error(error)}"
            raise AssertionError(
                f"{subject.title} breaks the rule {self.name}: {self.sentence}\nFound: {problem}\nTo fix it: {self.fix}"
            ) from error


def rule(fix: str) -> Callable[[Callable[[Subject], None]], ConformanceRule]:
    """Turn a function into a rule; its docstring is the sentence of the rule."""

    def make(check: Callable[[Subject], None]) -> ConformanceRule:
        return ConformanceRule(check.__name__, " ".join((inspect.getdoc(check) or "").split()), fix, check)

    return make


Value = Mapping[str, Any]  # an encoded value
DESCRIPTORS = (FunctionType, staticmethod, classmethod, property)


def class_attributes(plugin: Any) -> dict[str, Value]:
    # Attributes of the plugin's own classes, without methods.
    return {
        f"{kind.__qualname__}.{name}": encode(value)
        for kind in type(plugin).__mro__
        if kind not in (object, *Plugin.__mro__)
        for name, value in vars(kind).items()
        if not name.startswith(("__", "_abc")) and not isinstance(value, DESCRIPTORS)
    }


def is_same(left: Any, right: Any) -> bool:
    return not any(differing({"": encode(left)}, {"": encode(right)}))


def list_changes(before: Mapping[str, Value], now: Mapping[str, Value]) -> Iterator[str]:
    for name, old, new in differing(before, now):
        was, value = show_both(old, new)
        yield f"{name} was {was} and is {value}"
