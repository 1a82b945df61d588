"""Schedules of logs, validations and saves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..core.host import is_preempted
from ..events import Lane, Progress
from ..events import catalogue as ev
from ..events.checks import check_flag
from ..plugins import Plugin, on
from ..plugins.filters import Filter, Recurrence, is_unsaved, make_filter, moment

if TYPE_CHECKING:
    from ..events import Run
    from ..events.alarms import Alarm


class Counter(TypedDict, total=False):
    """The counters of `Every`; a schedule takes one of them."""

    batches: int
    epochs: int
    samples: int
    seconds: float
    skipped_steps: int
    steps: int
    tokens: int
    validations: int
    emissions: int
    fraction: float
    after: int | float


class Schedule(Plugin):
    """Base class of plugins that make a request whenever a filter is due.

    Args:
        when: a filter, such as `At(steps=[10, 100])`, or None if a counter is passed.
        at_start: also request it before the first batch.
        at_end: also request it at the end of a completed or stopped training, unless it was served at the last step
            or nothing was trained; by default for validations and saves, but not for logs. A save before the end of the
            last epoch does not replace the one at the end, because the state changes in between. The save at the end
            includes the metrics of the last validation, but not its effect on the state, so a longer run that resumes
            from it equals one that did not end there.
        **counter: instead of a filter, the arguments of `Every`: `steps=100`, `epochs=1`, `seconds=600`,
            `samples=10_000` or `fraction=0.1` of the run, optionally with `after=`.

    Raises:
        TypeError: neither a filter nor a counter is passed, or both are.
        ValueError: there is not exactly one counter, or its number is not positive. At the start of a run also if a
            fraction is counted and the length of the run is unknown.
    """

    at_end = True
    verb = "asks"
    options: tuple[str, ...] = ("at_start", "at_end")

    def __init__(
        self,
        when: Filter | None = None,
        *,
        at_start: bool = False,
        at_end: bool | None = None,
        **counter: Unpack[Counter],
    ) -> None:
        self.filter, self.at_start = make_filter(type(self).__name__, when, counter, *self.options), at_start
        if at_end is not None:
            self.at_end = at_end
        self._recurrence = Recurrence(self.filter)

    def describe(self, run: Run) -> str:
        moments = [str(self.filter), *["at the start"] * self.at_start, *["at the end"] * self.at_end]
        return f"{self.verb} {', '.join(moments)}"

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Start counting for a new run."""
        self._recurrence.begin(run)

    @on(ev.CheckpointLoaded)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Continue from the saved state."""
        self._recurrence.resume(run, self.moment)

    @on(ev.EpochStart)
    def start(self, run: Run, event: ev.EpochStart) -> None:
        """Make the request at the start."""
        if self.at_start and run.progress.epoch == run.progress.batches == 0 and self._recurrence.last < 0:
            self.ask(run, "at the start")

    @on(ev.BatchEnd, ev.EpochEnd, idle_until="next_due")
    def ask_when_due(self, run: Run, event: ev.BatchEnd | ev.EpochEnd) -> None:
        """Make the request if the filter is due."""
        if self.filter(run):
            self.ask(run, str(self.filter))

    def next_due(self, run: Run) -> Alarm | None:
        """Return the next due count, or None if the filter must be called each time."""
        idle_until = self.filter.idle_until
        return None if idle_until is None else idle_until(run)

    @on(ev.LastBoundary, lane=Lane.MEASURE)
    def finish(self, run: Run, event: ev.LastBoundary) -> None:
        """Make the request at the end."""
        if self.is_left(run):
            self.ask(run, "at the end")

    def is_left(self, run: Run) -> bool:
        """Return whether a request at the end is needed."""
        return self.at_end and run.progress.batches > 0 and self.moment(run.progress) != self._recurrence.last

    def forecast(self, totals: Mapping[str, float]) -> Mapping[str, int]:
        times = self.filter.times(totals)
        if times is None:
            return {}
        is_left = self.at_end and not self.filter.is_due_at_end(totals)
        return {self.asks[0]: times + self.at_start + is_left}

    def state_dict(self) -> dict[str, Any]:
        return self._recurrence.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recurrence.load_state_dict(state)

    def moment(self, progress: Progress) -> int:
        """Return a number that changes when a repeated request would have a new result."""
        return progress.batches

    @abstractmethod
    def ask(self, run: Run, reason: str) -> None:
        """Make the request."""


class LogSchedule(Schedule):
    """Request a log at an interval. See `Schedule` for the arguments."""

    asks = ("log",)
    verb = "logs"
    at_end = False

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.Log) -> None:
        """Record the moment of a log, whichever plugin requested it."""
        self._recurrence.last = self.moment(run.progress)

    def ask(self, run: Run, reason: str) -> None:
        """Request a log."""
        run.control.request_log(reason)


class ValidationSchedule(Schedule):
    """Request a validation at an interval.

    See `Schedule` for the other arguments.

    Args:
        required: whether `fit` without validation data is an error; False only adds a note.
    """

    asks = ("validation",)
    verb = "validates"
    options = (*Schedule.options, "required")

    def __init__(
        self,
        when: Filter | None = None,
        *,
        at_start: bool = False,
        at_end: bool | None = None,
        required: bool = True,
        **counter: Unpack[Counter],
    ) -> None:
        super().__init__(when, at_start=at_start, at_end=at_end, **counter)
        check_flag("required", required)
        self.needs = ("validation data",) * required

    def describe(self, run: Run) -> str:
        return super().describe(run) if run.data.validation_sets else ""

    @on(ev.TrainStart)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Start counting for a new run; note missing validation data."""
        super().begin(run, event)
        if not run.data.validation_sets:
            run.note("no validation: fit has no validation data")

    @on(ev.ValidationEnd, ev.ValidationCut, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut) -> None:
        """Record the moment of a validation, even if it was cut short."""
        self._recurrence.last = self.moment(run.progress)

    def is_left(self, run: Run) -> bool:
        """Return whether a validation at the end is needed; never after a preemption."""
        return super().is_left(run) and not is_preempted(run)

    def ask(self, run: Run, reason: str) -> None:
        """Request a validation if there is validation data."""
        if run.data.validation_sets:
            run.control.request_validation(reason)


class SaveSchedule(Schedule):
    """Request a save at an interval.

    The `SavePoint` comes after the validation of the same boundary. See `Schedule` for the arguments.
    """

    affects_training = False
    asks = ("save",)
    verb = "saves"

    @on(ev.TrainStart, lane=Lane.REPORT)
    def look_for_writer(self, run: Run, event: ev.TrainStart) -> None:
        """Warn if no plugin writes the saves."""
        if not run.report.is_replay and not run.plugins.writes_saves():
            from ..core.snapshot import unwritten

            for sentence in unwritten(run):
                run.warn(sentence)

    @on(ev.SavePoint, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.SavePoint) -> None:
        """Record the moment of a save, whichever plugin requested it."""
        self._recurrence.last = self.moment(run.progress)

    @on(ev.LastBoundary)
    def finish(self, run: Run, event: ev.LastBoundary) -> None:
        """Request a save at the end, after the last validation was requested."""
        if self.at_end and run.progress.batches > 0 and is_unsaved(run, self._recurrence):
            self.ask(run, "at the end")
            self._recurrence.last = moment(run.progress)  # now, because the save captures the state before `note`

    def ask(self, run: Run, reason: str) -> None:
        """Request a save."""
        run.control.request_save(reason)

    def moment(self, progress: Progress) -> int:
        """Return a number that also changes at the end of an epoch."""
        return moment(progress)
