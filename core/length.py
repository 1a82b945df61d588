"""The planned length of a run: its optimizer steps, and the end of a fraction of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from ..events import Progress
from ..plugins import Plugins
from .data.training_data import TrainingData
from .settings import Settings

if TYPE_CHECKING:
    from .stepping.schedulers import PlannedScheduler

ENDLESS = "the run has no length: pass epochs= or steps="
UNSIZED = "a train loader has no length: pass steps= instead of epochs=, or give the loader __len__"
UNEQUAL = "the phases of the data are not equally long, and a plugin switches them: pass steps= instead of epochs="
UNCOUNTED = "plugin {!r} accumulates gradients: give it a schedule instead of a condition, or a method number(epoch)"


class Length:
    """The length of a training from its first start to its end, and the part that is done.

    Attributes:
        max_epochs: the length in epochs; None without such a limit.
        max_steps: the length in optimizer steps; None without such a limit.
    """

    def __init__(self, settings: Settings, data: TrainingData, plugins: Plugins, progress: Progress) -> None:
        self._data, self._progress = data, progress
        self._planned: dict[str, PlannedScheduler] = {}
        self._more = 0  # steps in addition to today's epochs: before a resume the epochs may have had another length
        self.max_epochs, self.max_steps = settings.epochs, settings.steps
        self._whole_epochs = int(settings.epochs or 0)
        self._accumulates = plugins.declared("exclusive").get("accumulation")
        plugin = None if self._accumulates is None else plugins[self._accumulates]
        self._windows = _windows(plugin, ceil(settings.epochs or 0))

    @cached_property
    def unknown(self) -> str:
        """Why the number of steps is unknown before the run, and how to change that; empty if it is known."""
        if self.max_epochs is None:
            return ENDLESS if self.max_steps is None else ""
        if None in self._data.lengths:
            return UNSIZED
        if not self._windows:
            return UNCOUNTED.format(self._accumulates)
        return UNEQUAL if len({min(steps, self._most) for steps in self._by_phase}) > 1 else ""

    @property
    def batches_per_epoch(self) -> int | None:
        """The length of the train loader; None if it is unknown."""
        return self._data.length

    @property
    def planned_steps(self) -> int | None:
        """The planned optimizer steps, without skips and early ends of epochs; None if they are unknown."""
        if self.unknown:
            return None
        return self.max_steps if self.max_epochs is None else int(min(min(self._by_phase) + self._more, self._most))

    @property
    def done(self) -> int:
        """The planned steps that are done; the counted steps if the epochs have no length."""
        planned = self._until(self._progress.epoch, self._progress.batch)
        return self._progress.steps + self._progress.skipped_steps if planned is None else planned + self._more

    def resume(self, done: int, epoch: int, batch: int) -> None:
        """Plan the steps that were done before a resume and those that remain in today's epochs."""
        if (planned := self._until(epoch, batch)) is not None:
            self._more = done - planned

    def steps_or_raise(self, user: str) -> int:
        if self.planned_steps is None:
            raise ValueError(f"{user} needs to know the optimizer steps of the run, and {self.unknown}.")
        return self.planned_steps

    @property
    def scheduler_steps(self) -> dict[str, int]:
        """The planned steps of the schedulers that are functions of them, by name."""
        return dict.fromkeys(self._planned, self.planned_steps or 0)

    @property
    def epoch_fraction(self) -> float | None:
        """The epochs that are done, for example 1.25; None if the loader has no length."""
        return self._progress.epochs_done(self._data.length)

    @property
    def fraction(self) -> float | None:
        """The part of the planned steps that is done, from 0 to 1; None if they are unknown."""
        return self._progress.part_done(self.planned_steps, skips=self.max_epochs is not None)

    @property
    def last_batch(self) -> float:
        """The batch of this epoch at which the run ends, rounded up to a whole step; infinite if the epoch is whole."""
        source = self._data.source
        if self._progress.epoch != self._whole_epochs or source is None:
            return inf
        return self._last_batch(source.length)

    def complete(self, settings: Settings) -> Settings:
        """Return the settings with the schedulers that are functions of the number of steps."""
        if isinstance(self.max_epochs, float):
            for length in self._data.lengths:
                self._last_batch(length)
        if not settings.schedulers:
            return settings
        from .stepping.schedulers import PlannedScheduler  # imported when there are schedulers

        self._planned |= {
            name: planned for name, planned in settings.schedulers.items() if isinstance(planned, PlannedScheduler)
        }
        user = "A scheduler= that is a function of (optimizer, steps)"
        made = {name: planned.make(self.steps_or_raise(user)) for name, planned in self._planned.items()}
        return replace(settings, schedulers={**settings.schedulers, **made})

    def _last_batch(self, length: int | None) -> int:
        if length is None or not self._windows:
            raise ValueError(f"epochs={self.max_epochs} ends within an epoch, and {self.unknown}.")
        return min(length, self._part(length) * self._window(self._whole_epochs))

    @property
    def _most(self) -> float:
        return inf if self.max_steps is None else self.max_steps

    @cached_property
    def _by_phase(self) -> set[int]:
        return {self._of(length) for length in self._data.lengths if length is not None}

    def _until(self, epoch: int, batch: int) -> int | None:
        """Return the steps until a position in today's epochs; None if they have no common length."""
        length, *different = set(self._data.lengths)
        if self.max_epochs is None or length is None or different or not self._windows:
            return None
        return self._of_epochs(epoch, length) + ceil(min(batch, length) / self._window(epoch))

    def _of(self, length: int) -> int:
        return self._of_epochs(self._whole_epochs, length) + self._part(length)

    def _of_epochs(self, epochs: int, length: int) -> int:
        borders = [*(first for first in self._windows if first < epochs), epochs]
        return sum((end - first) * ceil(length / self._window(first)) for first, end in pairwise(borders))

    def _part(self, length: int) -> int:
        # Rounded up, except for the error of a float.
        fraction = (self.max_epochs or 0) - self._whole_epochs
        return ceil(round(fraction * ceil(length / self._window(self._whole_epochs)), 6))

    def _window(self, epoch: int) -> int:
        return next(number for first, number in reversed(self._windows.items()) if first <= epoch)


def _windows(plugin: Any, epochs: int) -> dict[int, int]:
    """Return the batches per step by the first epoch with that number; empty if they are unknown."""
    if plugin is None:
        return {0: 1}
    if (number := getattr(plugin, "number", None)) is None or getattr(plugin, "condition", None) is not None:
        return {}
    schedule = getattr(plugin, "schedule", None)
    firsts = schedule if isinstance(schedule, Mapping) else range(max(1, epochs))
    return {first: max(1, int(number(first))) for first in firsts}
