"""The trainer: holds the bus, the plugins and the engine; `fit`, `validate` and `test` are runs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch

from ..events import Bus, Engine
from ..events.catalogue import Phase
from ..plugins import Plugins
from . import loop
from .batches import check_loader
from .engine import DeviceEngine
from .result import RunResult
from .run import Settings, TrainRun
from .task import check_task, modules_of

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
Optimizer = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
NEEDS = {
    "validation": "fit was given validation=, but no plugin ever asks for a validation: add "
    "ValidationSchedule(Every(epochs=1)).",
    "stop": "the run has no end: pass epochs= or steps=, or add a plugin that stops it, such as EarlyStopping.",
    "scheduler": "fit was given scheduler=, but no plugin steps it: add LearningRate('step') or LearningRate('epoch').",
    "save": "it waits for save requests, and no plugin makes them: add SaveSchedule(Every(epochs=1)).",
    "log": "it waits for log requests, and no plugin makes them: add LogSchedule(Every(steps=50)).",
}


class Trainer:
    """Reusable: calls of `fit`, `validate` and `test` follow one another and never disturb each other.

    Args:
        plugins: plugin objects, in the order in which they run within a lane.
        device: `cpu`, `cuda`, `cuda:1`; by default a GPU where there is one.
        engine: an engine of your own, instead of `device`.

    Raises:
        TypeError: a plugin has a handler that does not fit its event.
        ValueError: plugins contradict each other; both `device` and `engine` are given; the device is not there.
    """

    def __init__(
        self, plugins: Iterable[Any] = (), *, device: str | torch.device | None = None, engine: Engine | None = None
    ) -> None:
        if device is not None and engine is not None:
            raise ValueError("Give device= or engine=, not both: an engine knows its device.")
        self.bus = Bus()
        self.plugins = Plugins(self.bus)
        self.engine: Engine = engine or DeviceEngine(device)
        for plugin in plugins:
            self.plugins.register(plugin)

    def fit(
        self,
        task: Any,
        train: Loader,
        *,
        validation: Loaders | None = None,
        optimizer: Optimizer,
        scheduler: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        name: str = "run",
        hyper_parameters: Mapping[str, Any] | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
    ) -> RunResult:
        """Train.

        Args:
            task: an object with `training_step(run, batch)`, such as `Supervised(model, loss_fn)`.
            train: an iterable of batches, sized or not; read anew in every epoch.
            validation: one such iterable, or several by name.
            optimizer: an optimizer, or a function that makes one from the task's parameters.
            scheduler: a learning-rate scheduler, stepped by the plugin `LearningRate`.
            epochs: how many epochs; with `steps`, whichever comes first. Counted from the run's first beginning: a
                resumed run does the rest.
            steps: how many optimizer steps.
            name: the run's name, as in file names.
            hyper_parameters: what to tell loggers of this run.
            on_interrupt: whether Ctrl-C raises KeyboardInterrupt or returns a result with status `interrupted`.

        Returns:
            How the run ended. A failure raises.

        Raises:
            TypeError: the task has no `training_step`, a loader cannot be iterated.
            ValueError: a loader is empty, a length is not positive, or nothing would ever do what was asked for.
        """
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt is 'raise' or 'return', got {on_interrupt!r}.")
        run = self.run(
            task,
            train,
            validation=validation,
            optimizer=optimizer,
            scheduler=scheduler,
            epochs=epochs,
            steps=steps,
            name=name,
            hyper_parameters=hyper_parameters,
        )
        try:
            with run:
                loop.fit(run)
        except KeyboardInterrupt:
            if on_interrupt == "raise":
                raise
        return run.result

    def run(
        self,
        task: Any,
        train: Loader,
        *,
        validation: Loaders | None = None,
        optimizer: Optimizer,
        scheduler: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        name: str = "run",
        hyper_parameters: Mapping[str, Any] | None = None,
    ) -> TrainRun:
        """Return a run for a loop of your own; the arguments are those of `fit`.

        with trainer.run(task, train, optimizer=optimizer, epochs=3) as run:
            for epoch in run.epochs():
                for inputs, targets in run.batches():
                    run.step(loss_fn(model(inputs), targets))
        """
        check_loader(train, "train")
        for unit, limit in (("epochs", epochs), ("steps", steps)):
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ValueError(f"{unit}= must be a positive whole number, got {limit!r}.")
        evaluations: dict[Phase, dict[str, Loader]] = (
            {"validation": _named(validation, "validation")} if validation is not None else {}
        )
        if validation is not None:
            check_task(task, "validation_step")
        self._check_needs(validation is not None, epochs is None and steps is None, scheduler is not None)
        settings = Settings(
            name=_checked_name(name),
            task=task,
            train=train,
            evaluations=evaluations,
            optimizer=_made_optimizer(optimizer, task),
            scheduler=scheduler,
            epochs=epochs,
            steps=steps,
            hyper_parameters=dict(hyper_parameters or {}),
        )
        return TrainRun(settings, self.bus, self.plugins, self.engine)

    def validate(self, task: Any, validation: Loaders, *, name: str = "run") -> RunResult:
        """Run the task's `validation_step` over one or several sets; the means are in `result.metrics`."""
        return self._evaluate(task, validation, "validation", name)

    def test(self, task: Any, test: Loaders, *, name: str = "run") -> RunResult:
        """Run the task's `test_step` over one or several sets; the means are in `result.metrics`."""
        return self._evaluate(task, test, "test", name)

    def plan(self) -> str:
        """Return what hears each event, in the order in which it runs."""
        return self.plugins.plan()

    def _evaluate(self, task: Any, loaders: Loaders, phase: Phase, name: str) -> RunResult:
        check_task(task, f"{phase}_step")
        settings = Settings(name=_checked_name(name), task=task, evaluations={phase: _named(loaders, phase)})
        with TrainRun(settings, self.bus, self.plugins, self.engine, phase) as run:
            loop.evaluate(run, phase)
        return run.result

    def _check_needs(self, validates: bool, endless: bool, schedules: bool) -> None:
        """Raise ValueError where something that was asked for would never happen."""
        asked = self.plugins.declared("asks")
        needs = {"validation": validates, "stop": endless, "scheduler": schedules}
        for word, needed in needs.items():
            if needed and word not in asked:
                raise ValueError(_sentence(NEEDS[word]) + f" A plugin of yours says so with asks = ({word!r},).")
        for word, names in self.plugins.declared("needs").items():
            if word not in asked:
                raise ValueError(f"Plugin {names[0]!r} would never act: {NEEDS[word]}")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _named(loaders: Loaders, split: str) -> dict[str, Loader]:
    """Return the sets of a split by name; a single one has the empty name."""
    named = dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}
    for name, loader in named.items():
        if "/" in name:
            raise ValueError(f"The name of a {split} set becomes part of metric names: no '/' in {name!r}.")
        check_loader(loader, f"{split} {name}".strip())
    return named


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(f"name= becomes part of file names: letters and digits, no slashes; got {name!r}.")
    return name


def _made_optimizer(optimizer: Optimizer, task: Any) -> torch.optim.Optimizer:
    """Return the optimizer, made from the task's parameters where a function was given."""
    check_task(task, "training_step")
    modules = modules_of(task).values()
    made = optimizer
    if not isinstance(made, torch.optim.Optimizer) and callable(made):
        made = made([parameter for module in modules for parameter in module.parameters()])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer= takes a torch optimizer, or a function that makes one from parameters, got {optimizer!r}."
        )
    return made
