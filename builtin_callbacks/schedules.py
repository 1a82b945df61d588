"""When to log, validate and save."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..core.host import is_preempted
from ..events import Lane, Progress, Run
from ..events import catalogue as ev
from ..events.checks import check_flag
from ..plugins import Plugin, on
from ..plugins.filters import Filter, Recurrence, is_unsaved, make_filter, moment

if TYPE_CHECKING:
    from ..events.alarms import Alarm


class Counter(TypedDict, total=False):
    """The counters of `Every`, of which a schedule takes one."""

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
    """Ask for something whenever a filter says so, on absolute counters.

    Args:
        when: a filter, such as `At(steps=[10, 100])`; or leave it out, and give a counter.
        at_start: also before the first batch.
        at_end: also when training is over, completed or stopped, unless it was done at the last step anyway, or nothing
            was trained; by default for validations and saves, not for logs. A save before the end of the last epoch
            does not count: the state is another one after it. The save has the metrics of the last validation, but not
            its effects on the state: a longer run that resumes from it equals one that did not end there.
        **counter: instead of a filter, what `Every` takes: `steps=100`, `epochs=1`, `seconds=600`, `samples=10_000`,
            `fraction=0.1` of the run, perhaps with `after=`.

    Raises:
        TypeError: there is neither a filter nor a counter, or both.
        ValueError: the counter is not one, or its number is not positive; at the run's start, the length that a
            fraction is of is not known.
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
        """Forget the former run."""
        self._recurrence.begin(run)

    @on(ev.CheckpointLoaded)
    def go_on(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Continue from what was saved."""
        self._recurrence.resume(run, self.moment)

    @on(ev.EpochStart)
    def start(self, run: Run, event: ev.EpochStart) -> None:
        """Ask at the start, unless it is done."""
        if self.at_start and run.progress.epoch == run.progress.batches == 0 and self._recurrence.last < 0:
            self.ask(run, "at the start")

    @on(ev.BatchEnd, ev.EpochEnd, idle_until="next_due")
    def ask_when_due(self, run: Run, event: ev.BatchEnd | ev.EpochEnd) -> None:
        """Ask within an epoch, and at its end."""
        if self.filter(run):
            self.ask(run, str(self.filter))

    def next_due(self, run: Run) -> Alarm | None:
        """Return the count at which it is due; None where it has to be asked at each."""
        idle_until = self.filter.idle_until
        return None if idle_until is None else idle_until(run)

    @on(ev.LastBoundary, lane=Lane.MEASURE)
    def finish(self, run: Run, event: ev.LastBoundary) -> None:
        """Ask at the end."""
        if self.is_left(run):
            self.ask(run, "at the end")

    def is_left(self, run: Run) -> bool:
        """Return whether something is left to be asked for at the end."""
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
    verb = "logs"
    at_end = False

    @on(ev.Log, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.Log) -> None:
        """Remember that it was done, for whichever plugin."""
        self._recurrence.last = self.moment(run.progress)

    def ask(self, run: Run, reason: str) -> None:
        """Request a log."""
        run.control.request_log(reason)


class ValidationSchedule(Schedule):
    """Request a validation at an interval.

    See `Schedule` for the other arguments.

    Args:
        required: whether `fit` without validation data is an error; False notes it, and asks for nothing.
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
        """Forget the former run, and say so where there is nothing to validate on."""
        super().begin(run, event)
        if not run.data.validation_sets:
            run.note("nothing is validated, as fit was given no validation data")

    @on(ev.ValidationEnd, ev.ValidationCut, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.ValidationEnd | ev.ValidationCut) -> None:
        """Remember that it was done, for whichever plugin, or cut short: this run does not repeat it."""
        self._recurrence.last = self.moment(run.progress)

    def is_left(self, run: Run) -> bool:
        """Return whether it is left to be done at the end; a process that is to be taken away has no time for it."""
        return super().is_left(run) and not is_preempted(run)

    def ask(self, run: Run, reason: str) -> None:
        """Request a validation, if there is something to validate on."""
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
        """Say so where no plugin writes anything at a save."""
        if not run.report.is_replay and not run.plugins.writes_saves():
            from ..core.snapshot import unwritten

            for sentence in unwritten(run):
                run.warn(sentence)

    @on(ev.SavePoint, lane=Lane.MEASURE, optional=True)
    def note(self, run: Run, event: ev.SavePoint) -> None:
        """Remember that it was done, for whichever plugin."""
        self._recurrence.last = self.moment(run.progress)

    @on(ev.LastBoundary)
    def finish(self, run: Run, event: ev.LastBoundary) -> None:
        """Ask at the end, when it is known whether that is validated."""
        if self.at_end and run.progress.batches > 0 and is_unsaved(run, self._recurrence):
            self.ask(run, "at the end")
            self._recurrence.last = moment(run.progress)  # the state is held before the save

    def ask(self, run: Run, reason: str) -> None:
        """Request a save."""
        run.control.request_save(reason)

    def moment(self, progress: Progress) -> int:
        """Return a number that the end of an epoch changes, too."""
        return moment(progress)
