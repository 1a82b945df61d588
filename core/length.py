"""The length of a run before it begins: its optimizer steps, and where a fraction of an epoch ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from ..events import Progress
from ..plugins import Plugins
from .data.module import DataModule
from .data.module_life import open_module
from .data.training_data import TrainingData
from .settings import Settings, check_length, training_loaders
from .stepping.schedulers import PlannedScheduler

if TYPE_CHECKING:
    from .engines.contract import LoopEngine

ENDLESS = "the run has no length: pass epochs= or steps="
UNSIZED = "a train loader has no length: pass steps= instead of epochs=, or give the loader __len__"
UNEQUAL = (
    "the phases of the training data are not equally long, and a plugin decides when the next one begins: pass steps= "
    "instead of epochs="
)
CONDITIONAL = (
    "plugin {!r} accumulates gradients on a condition: give it a schedule by epochs instead, or pass the steps"
)
UNCOUNTED = "plugin {!r} accumulates gradients and does not say how many batches make a step: give it number(epoch)"


class Length:
    """The length of a run, from its first beginning to its end, and how much of it is done.

    Args:
        settings: of the run.
        data: which it trains on.
        plugins: one of them may accumulate gradients.
        progress: where the run is.
    """

    def __init__(self, settings: Settings, data: TrainingData, plugins: Plugins, progress: Progress) -> None:
        self._data, self._progress, self._planned = data, progress, dict[str, PlannedScheduler]()
        self._more = 0  # than epochs as they are now would have: those before a resume may have been of other lengths
        self._epochs, self._max_steps = settings.epochs, settings.steps
        self._whole = int(settings.epochs or 0)
        self._accumulates = plugins.declared("exclusive").get("accumulation")
        plugin = None if self._accumulates is None else plugins[self._accumulates]
        self._is_conditional = getattr(plugin, "condition", None) is not None
        self._windows = {} if self._is_conditional else _windows(plugin, ceil(settings.epochs or 0))

    @cached_property
    def unknown(self) -> str:
        """Why the number of steps is not known before the run, and the mend; empty where it is known."""
        if self._epochs is None:
            return ENDLESS if self._max_steps is None else ""
        if None in self._data.lengths:
            return UNSIZED
        if not self._windows:
            return (CONDITIONAL if self._is_conditional else UNCOUNTED).format(self._accumulates)
        return UNEQUAL if len({min(each, self._most) for each in self._by_phase}) > 1 else ""

    @property
    def max_epochs(self) -> float | None:
        """The length in epochs; None without such a limit."""
        return self._epochs

    @property
    def max_steps(self) -> int | None:
        """The length in optimizer steps; None without such a limit."""
        return self._max_steps

    @property
    def batches_per_epoch(self) -> int | None:
        """The length of the train loader; None if it is unknown."""
        return self._data.length

    @property
    def planned_steps(self) -> int | None:
        """The optimizer steps; None where they are unknown. No skips are foreseen, nor epochs that end early."""
        if self.unknown:
            return None
        return self._max_steps if self._epochs is None else int(min(min(self._by_phase) + self._more, self._most))

    @property
    def done(self) -> int:
        """How many of the planned steps are done; those that were counted, where epochs do not say it."""
        planned = self._until(self._progress.epoch, self._progress.batch)
        return self._progress.steps + self._progress.skipped_steps if planned is None else planned + self._more

    def resume(self, done: int, epoch: int, batch: int) -> None:
        """Plan as many steps as were done, and those that remain from a position, in epochs as they are now."""
        if (planned := self._until(epoch, batch)) is not None:
            self._more = done - planned

    def steps_or_raise(self, what: str) -> int:
        """Return the optimizer steps; ValueError where they are unknown, which names what they are for."""
        if self.planned_steps is None:
            raise ValueError(f"{what} needs to know the optimizer steps of the run, and {self.unknown}.")
        return self.planned_steps

    @property
    def scheduler_steps(self) -> dict[str, int]:
        """For how many steps those schedulers were made that are functions of it, by name."""
        return dict.fromkeys(self._planned, self.planned_steps or 0)

    @property
    def epoch_fraction(self) -> float | None:
        """How many epochs are done, such as 1.25; None where the loader has no length."""
        return self._progress.epochs_done(self._data.length)

    @property
    def fraction(self) -> float | None:
        """Which part of the planned steps is done, from 0 to 1; None where these are unknown."""
        return self._progress.part_done(self.planned_steps, skips=self._epochs is not None)

    @property
    def last_batch(self) -> float:
        """After how many batches of this epoch the run ends, if that is with a fraction of it; else infinite.

        The fraction is rounded up to a whole step.
        """
        source = self._data.source
        if self._progress.epoch != self._whole or source is None:
            return inf
        return self._last_batch(source.length)

    def complete(self, settings: Settings) -> Settings:
        """Return the settings with the schedulers made that are functions of the number of steps.

        Raises:
            ValueError: the length of the run is not known, and is needed.
        """
        if isinstance(self._epochs, float):
            for length in self._data.lengths:
                self._last_batch(length)
        self._planned |= {
            name: each for name, each in settings.schedulers.items() if isinstance(each, PlannedScheduler)
        }
        what = "A scheduler= that is a function of (optimizer, steps)"
        made = {name: each.make(self.steps_or_raise(what)) for name, each in self._planned.items()}
        return replace(settings, schedulers={**settings.schedulers, **made})

    def _last_batch(self, length: int | None) -> int:
        if length is None or not self._windows:
            raise ValueError(f"epochs={self._epochs} ends within an epoch, and {self.unknown}.")
        return min(length, self._part(length) * self._window(self._whole))

    @property
    def _most(self) -> float:
        return inf if self._max_steps is None else self._max_steps

    @cached_property
    def _by_phase(self) -> set[int]:
        return {self._of(length) for length in self._data.lengths if length is not None}

    def _until(self, epoch: int, batch: int) -> int | None:
        """Return the steps until a position in epochs as they are now; None where these do not say it."""
        length, *others = set(self._data.lengths)
        if self._epochs is None or length is None or others or not self._windows:
            return None
        return self._of_epochs(epoch, length) + ceil(min(batch, length) / self._window(epoch))

    def _of(self, length: int) -> int:
        return self._of_epochs(self._whole, length) + self._part(length)

    def _of_epochs(self, epochs: int, length: int) -> int:
        """Return the steps of whole epochs of so many batches."""
        borders = [*(first for first in self._windows if first < epochs), epochs]
        return sum((end - first) * ceil(length / self._window(first)) for first, end in pairwise(borders))

    def _part(self, length: int) -> int:
        """Return the steps of the fraction of an epoch at the end: rounded up, but for what a float is off."""
        fraction = (self._epochs or 0) - self._whole
        return ceil(round(fraction * ceil(length / self._window(self._whole)), 6))

    def _window(self, epoch: int) -> int:
        return next(number for first, number in reversed(self._windows.items()) if first <= epoch)


def _windows(plugin: Any, epochs: int) -> dict[int, int]:
    """Return how many batches make a step, by the first epoch of which that is so; nothing where it is unknown."""
    if plugin is None:
        return {0: 1}
    if (number := getattr(plugin, "number", None)) is None:
        return {}
    schedule = getattr(plugin, "schedule", None)
    firsts = schedule if isinstance(schedule, Mapping) else range(max(1, epochs))
    return {first: max(1, int(number(first))) for first in firsts}


def count_steps(
    engine: LoopEngine, plugins: Plugins, train: Any, epochs: object, steps: object, options: Mapping[str, Any]
) -> int:
    """Return the steps that a `fit` plans; see `Trainer.planned_steps`."""
    given = check_length(epochs, steps)
    with ExitStack() as life:
        life.enter_context(engine.process())
        if isinstance(train, DataModule):
            module = open_module(train, life, engine)
            train, options = (
                module.train(),
                {**options, "loader_params": options["loader_params"] or module.loader_params},
            )
        loaders = training_loaders(train, options, engine.world_size)[0]
        data = TrainingData(loaders, engine)
        life.callback(data.close)
        settings = Settings("run", None, loaders, epochs=given[0], steps=given[1])
        return Length(settings, data, plugins, Progress()).steps_or_raise("planned_steps")
