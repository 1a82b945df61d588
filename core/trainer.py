"""The trainer: holds the bus, the plugins and the engine; `fit`, `validate` and `test` are runs of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Unpack

import torch

from ..events import Bus
from ..events.catalogue import Phase
from ..plugins import Plugins
from . import loop, settings
from .engine import DeviceEngine, LoopEngine
from .plan import plan
from .result import RunResult
from .run import TrainRun


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
        self, plugins: Iterable[Any] = (), *, device: str | torch.device | None = None, engine: LoopEngine | None = None
    ) -> None:
        if device is not None and engine is not None:
            raise ValueError("Give device= or engine=, not both: an engine knows its device.")
        self.bus = Bus()
        self.plugins = Plugins(self.bus)
        self.engine: LoopEngine = engine or DeviceEngine(device)
        if not isinstance(plugins, Iterable):
            raise TypeError(
                f"Trainer(plugins) takes a list of plugin objects: Trainer([{type(plugins).__name__}(...)])."
            )
        for plugin in plugins:
            self.plugins.register(plugin)

    def fit(
        self,
        task: Any,
        train: Iterable[Any],
        *,
        on_interrupt: Literal["raise", "return"] = "raise",
        **options: Unpack[settings.FitOptions],
    ) -> RunResult:
        """Train.

        Args:
            task: an object with `training_step(run, batch)`, such as `Supervised(model, loss_fn)`.
            train: an iterable of batches, sized or not; read anew in every epoch.
            on_interrupt: whether Ctrl-C raises KeyboardInterrupt or returns a result with status `interrupted`.
            **options: as follows.
            validation: an iterable of batches, or several by name.
            optimizer: an optimizer, or a function that makes one from the list of the task's parameters.
            scheduler: a learning-rate scheduler, or a function that makes one from the optimizer; stepped by the plugin
                `LearningRate`.
            epochs: how many epochs; with `steps`, whichever comes first. Counted from the run's first beginning: a
                resumed run does the rest.
            steps: how many optimizer steps.
            name: the run's name, as in file names; `run` by default.
            hyper_parameters: what to tell loggers of this run.

        Returns:
            How the run ended. A failure raises.

        Raises:
            TypeError: the task has no `training_step`, a loader cannot be iterated, the optimizer is none.
            ValueError: a loader is empty, a length is not positive, or nothing would ever do what was asked for.
        """
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt is 'raise' or 'return', got {on_interrupt!r}.")
        run = self.run(task, train, **options)
        try:
            with run:
                loop.fit(run)
        except KeyboardInterrupt:
            if on_interrupt == "raise":
                raise
        return run.result

    def run(self, task: Any, train: Iterable[Any], **options: Unpack[settings.FitOptions]) -> TrainRun:
        """Return a run for a loop of your own, with the arguments of `fit`.

        Within `with trainer.run(...) as run:`, loop over `run.epochs()`, in it over `run.batches()`, and call
        `run.step(loss)` for each batch.
        """
        checked = settings.training(task, train, options)
        settings.check_needs(checked, self.plugins)
        return TrainRun(checked, self.bus, self.plugins, self.engine)

    def validate(self, task: Any, validation: settings.Loaders, *, name: str = "run") -> RunResult:
        """Run the task's `validation_step` over one or several sets; the means are in `result.metrics`."""
        return self._evaluate(task, validation, "validation", name)

    def test(self, task: Any, test: settings.Loaders, *, name: str = "run") -> RunResult:
        """Run the task's `test_step` over one or several sets; the means are in `result.metrics`."""
        return self._evaluate(task, test, "test", name)

    def plan(self) -> str:
        """Return what hears each event, in the order in which it runs."""
        return plan(self.bus)

    def _evaluate(self, task: Any, loaders: settings.Loaders, phase: Phase, name: str) -> RunResult:
        with TrainRun(
            settings.evaluation(task, loaders, phase, name), self.bus, self.plugins, self.engine, phase
        ) as run:
            loop.evaluate(run, phase)
        return run.result
