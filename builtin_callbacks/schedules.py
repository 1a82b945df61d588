"""When to log, validate and save."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ..events import (
    BatchEnd,
    CheckpointLoaded,
    EpochEnd,
    EpochStart,
    Lane,
    Log,
    Progress,
    Run,
    SavePoint,
    TrainEnd,
    TrainStart,
    ValidationEnd,
)
from ..plugins import Plugin, on
from ..plugins.filters import Filter


class Schedule(Plugin):
    """Ask for something whenever a filter says so, on absolute counters.

    Args:
        when: such as `Every(steps=100)`, `Every(epochs=1)`, `Every(seconds=600)`, `Every(samples=10_000)`, `At(...)`.
        at_start: also before the first batch.
        at_end: also when training is over, unless it was done at the last step anyway, or nothing was trained. A save
            before the end of the last epoch does not count: the state is another one after it.

    Raises:
        TypeError: `when` is not a filter.
    """

    def __init__(self, when: Filter, *, at_start: bool = False, at_end: bool = False) -> None:
        if not isinstance(when, Filter):
            raise TypeError(f"{type(self).__name__}(when) takes a filter such as Every(steps=100), got {when!r}.")
        self.when, self.at_start, self.at_end = deepcopy(when), at_start, at_end
        self._last = -1
        self._origin: Progress | None = None
        self._saved: Mapping[str, Any] | None = None

    @on(TrainStart)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Forget the former run."""
        self._last, self._origin, self._saved = -1, run.origin, None

    @on(CheckpointLoaded)
    def go_on(self, run: Run, event: CheckpointLoaded) -> None:
        """Continue from what was saved."""
        self._origin = run.origin
        self._last = self.moment(run.origin) if self._saved is None else self._saved["last"]
        self.when.load_state_dict(run.origin, {} if self._saved is None else self._saved["filter"])
        self._saved = None

    @on(EpochStart)
    def start(self, run: Run, event: EpochStart) -> None:
        """Ask at the start, unless it is done."""
        if self.at_start and run.progress.epoch == run.progress.batches == 0 and self._last < 0:
            self.ask(run, "at the start")

    @on(BatchEnd, EpochEnd)
    def ask_when_due(self, run: Run, event: BatchEnd | EpochEnd) -> None:
        """Ask within an epoch, and at its end."""
        if self.when(run):
            self.ask(run, str(self.when))

    @on(TrainEnd)
    def finish(self, run: Run, event: TrainEnd) -> None:
        """Ask at the end."""
        if self.at_end and run.progress.batches and self.moment(run.progress) != self._last:
            self.ask(run, "at the end")

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last done, and what is due next."""
        if self._saved is not None:  # not taken over yet
            return dict(self._saved)
        return {} if self._origin is None else {"last": self._last, "filter": self.when.state_dict(self._origin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the run has its new origin."""
        self._saved = state or None

    def moment(self, progress: Progress) -> int:
        """Return what is another number where doing it once more would bring something else."""
        return progress.batches

    @abstractmethod
    def ask(self, run: Run, reason: str) -> None:
        """Make the request."""


class LogSchedule(Schedule):
    """Request a log at an interval.

    See `Schedule` for the arguments.
    """

    asks = ("log",)

    @on(Log, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: Log) -> None:
        """Remember that it was done, for whichever plugin."""
        self._last = self.moment(run.progress)

    def ask(self, run: Run, reason: str) -> None:
        """Request a log."""
        run.control.request_log(reason)


class ValidationSchedule(Schedule):
    """Request a validation at an interval.

    See `Schedule` for the arguments.
    """

    asks = ("validation",)
    needs = ("validation data",)

    @on(ValidationEnd, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ValidationEnd) -> None:
        """Remember that it was done, for whichever plugin."""
        self._last = self.moment(run.progress)

    def ask(self, run: Run, reason: str) -> None:
        """Request a validation."""
        run.control.request_validation(reason)


class SaveSchedule(Schedule):
    """Request a save at an interval.

    The `SavePoint` comes after the validation of the same boundary. See `Schedule` for the arguments.
    """

    affects_training = False
    asks = ("save",)

    @on(SavePoint, lane=Lane.MEASURE)
    def note(self, run: Run, event: SavePoint) -> None:
        """Remember that it was done, for whichever plugin."""
        self._last = self.moment(run.progress)

    def ask(self, run: Run, reason: str) -> None:
        """Request a save."""
        run.control.request_save(reason)

    def moment(self, progress: Progress) -> int:
        """Return a number that the end of an epoch changes, too."""
        return progress.batches + progress.epoch
