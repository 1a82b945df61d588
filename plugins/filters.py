"""Filters for any event and any counter, such as `@on(StepEnd, when=Every(steps=10))`.

Filters use absolute counters, so a resumed run neither drifts nor fires twice. A filter that could not be evaluated in
time, because its plugin was disabled, fires once afterwards. Checkpoints contain the state of the filters of plugins'
handlers, but not of functions, which have no name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from math import ceil, floor, inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from ..events import Progress
from ..events.checks import check_number, check_whole_number, known_names

if TYPE_CHECKING:
    from ..events import Run
    from ..events.alarms import Alarm, Idle

COUNTERS = {
    "batches": "batches",
    "epochs": "epoch",
    "samples": "samples",
    "seconds": "seconds",
    "skipped_steps": "skipped_steps",
    "steps": "steps",
    "tokens": "tokens",
    "validations": "validations",
}
READ = {unit: attrgetter(attribute) for unit, attribute in COUNTERS.items()}  # alarms are grouped by these objects

FRACTION = "fraction"  # of the planned steps of the run, rounded up to a step
NO_COUNTERS = ("emissions", FRACTION)  # not in `Progress`
EXACT = ("batches", "epochs", "steps")  # counters with a known total
SOON = 1e-9  # seconds


class Filter(ABC):
    """Passes an event if a counter has reached the next due value.

    Attributes:
        passed: whether an event has passed in this training.
    """

    def __new__(cls, *unnamed: Any, **_counters: Any) -> Self:
        if unnamed:
            raise TypeError(f"{cls.__name__} takes its counter by name, as in {cls.__name__}(steps={unnamed[0]!r}).")
        return super().__new__(cls)

    def __init__(self, counters: dict[str, float | Sequence[float]]) -> None:
        if len(counters) != 1:
            names = ", ".join(counters) or "none"
            raise ValueError(
                f"{type(self).__name__} takes exactly one counter, got {names}; for example Every(steps=100)."
            )
        self.unit, value = next(iter(counters.items()))
        if self.unit not in COUNTERS and self.unit not in NO_COUNTERS:
            raise ValueError(f"Unknown counter {self.unit!r}.{known_names(self.unit, [*COUNTERS, *NO_COUNTERS])}")
        values: list[Any] = [value]
        if isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", True):
            values = list(value)  # a zero-dimensional tensor is an Iterable, but cannot be iterated over
        if not values:
            raise ValueError(f"{type(self).__name__}({self.unit}=...) takes at least one number.")
        self.values = sorted(self._check(f"The argument of {type(self).__name__}({self.unit}=...)", values))
        self._planned: int | None = None  # steps of the run, if a fraction is counted
        self._counts_skips = False
        self._origin: Progress | None = None
        self.passed = False
        self._due: float = inf
        self._emissions = 0
        self._count: Callable[[Progress], float]
        if self.unit in NO_COUNTERS:
            self._count = self._next_emission if self.unit == "emissions" else self._steps_of_all
        else:
            self._count = READ[self.unit]

    def _check(self, argument: str, values: Iterable[Any]) -> list[float]:
        if self.unit == FRACTION:
            return [check_number(argument, value, more_than=0, at_most=1) for value in values]
        if self.unit == "seconds":
            return [check_number(argument, value, more_than=0) for value in values]
        return [check_whole_number(argument, value, at_least=1) for value in values]

    @staticmethod
    def plan_all(run: Run) -> None:
        """Pass the length of a run that begins to the filters of all handlers.

        Raises:
            ValueError: a filter counts fractions, and the length is unknown.
        """
        for signal in run.bus.signals():
            for subscription in signal.subscriptions.values():
                if isinstance(subscription.when, Filter):
                    subscription.when.plan(run)

    def plan(self, run: Run) -> None:
        """Read the length of a run that begins, if the filter counts fractions of it.

        Raises:
            ValueError: the length is unknown.
        """
        if self.unit == FRACTION:
            self._planned, self._counts_skips = run.length.planned_steps, run.length.max_epochs is not None
            if self._planned is None and run.optimizers:  # an evaluation has no steps to count
                kind = type(self).__name__
                raise ValueError(
                    f"{kind}({FRACTION}=...) needs the number of optimizer steps of the run, but {run.length.unknown}; "
                    f"or use another counter, as in {kind}(steps=100)."
                )

    def in_units(self, values: Iterable[float]) -> list[float]:
        """Convert fractions of the run to steps, without rounding; keep other values."""
        return [value * self._planned if self._planned else value for value in values]

    def __call__(self, run: Run) -> bool:
        """Return whether the event passes."""
        if run.origin is not self._origin:
            self._begin(run)
        count = self._count(run.progress)
        if count < self._due:
            return False
        self._due, self.passed = self.due_after(count), True
        return True

    @property
    def idle_until(self) -> Idle | None:
        """A function that returns the next due count; None if the filter must be called.

        Seconds are never predicted, because a handler may set the clock for later handlers, as a recorder does.
        """
        is_predictable = self.unit not in ("emissions", "seconds") and type(self).__call__ is Filter.__call__
        return self._next_due if is_predictable else None

    def _next_due(self, run: Run) -> Alarm:
        count = READ[self.unit] if isinstance(self._count, attrgetter) else self._count  # a deepcopy copies `_count`
        return count, self._due if run.origin is self._origin else -inf

    @abstractmethod
    def due_after(self, count: float) -> float:
        """Return the next due value above `count`."""

    def shorten(self) -> None:
        """Be due as early as possible, for a rehearsal."""
        if self.unit == FRACTION:
            self.unit, self._count = "steps", attrgetter("steps")
        self.values = [SOON if self.unit == "seconds" else 1]

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return how often the filter is due in a run; None if that is unknown.

        Args:
            totals: the totals of the run, such as `{"steps": 1000, "epochs": 10}`.
        """
        return sum(value <= totals[self.unit] for value in self.values) if self.unit in totals else None

    def is_due_at_end(self, totals: Mapping[str, float]) -> bool:
        """Return whether the filter is known to be due at the last step; see `times`."""
        end = totals.get(self.unit)
        return end is not None and self.unit in EXACT and self.due_after(end - 1) == end

    def __repr__(self) -> str:
        """Return the constructor call, such as `Every(steps=100)`."""
        values = getattr(self, "values", [])  # the constructor may have failed
        arguments = {self.unit: values[0] if len(values) == 1 else tuple(values)} if values else {}
        arguments |= {"after": after} if (after := getattr(self, "after", None)) is not None else {}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def __str__(self) -> str:
        values = ", ".join(map(str, self.values))
        return f"{type(self).__name__.lower()} {values} of the run" if self.unit == FRACTION else self._rule

    @property
    def _rule(self) -> str:
        # Identifies the filter of a saved state, so the text must never change.
        of = f" of {self._planned} steps" if self._planned else ""
        return f"{type(self).__name__.lower()} {', '.join(map(str, self.values))} {self.unit}{of}"

    def state_dict(self, origin: Progress) -> dict[str, Any]:
        """Return the state for `load_state_dict`.

        Args:
            origin: the `run.origin` of the current run.
        """
        if origin is not self._origin:  # not yet called in this run
            self.load_state_dict(origin, {})
        return {"rule": self._rule, "due": self._due, "emissions": self._emissions}

    def load_state_dict(self, origin: Progress, state: Mapping[str, Any]) -> None:
        """Continue in a resumed run; without a state, begin at the run's start.

        If the arguments of the filter have changed, the new ones apply immediately.

        Args:
            origin: the `run.origin` of the resumed run.
            state: a result of `state_dict`, or an empty dict.
        """
        self._origin = origin
        self._emissions = state.get("emissions", 0)
        counts = {"emissions": self._emissions, "seconds": origin.earlier_seconds}  # `origin.seconds` keeps running
        count = counts[self.unit] if self.unit in counts else self._count(origin)
        self._due = state["due"] if state.get("rule") == self._rule else self.due_after(count)

    def _begin(self, run: Run) -> None:
        self.plan(run)
        self.load_state_dict(run.origin, {})

    def _steps_of_all(self, progress: Progress) -> float:
        return progress.steps + self._counts_skips * progress.skipped_steps

    def _next_emission(self, progress: Progress) -> float:
        self._emissions += 1
        return self._emissions


class Every(Filter):
    """Every n of a counter, such as `Every(steps=100)`, `Every(fraction=0.1)`.

    Args:
        after: never due before this value of the counter. `Every(steps=100, after=1000)` begins at step 1000.
        **counter: one of `batches`, `epochs`, `samples`, `seconds`, `skipped_steps`, `steps`, `tokens`, `validations`,
            `emissions` (of the event), `fraction` (of the planned optimizer steps of the run).

    Raises:
        ValueError: there is not exactly one counter, or a number is not positive. At the start of a run also if a
            fraction is counted and the length of the run is unknown.
    """

    def __init__(self, *, after: float | None = None, **counter: float) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 1:
            raise ValueError(f"Every({self.unit}=...) takes one number, got {self.values}: use At for several.")
        self.after = None if after is None else self._check(f"after= of Every({self.unit}=...)", [after])[0]

    def __str__(self) -> str:
        after = "" if self.after is None else f" after {self.after}"
        if self.values != [1] or self.unit == FRACTION:
            return super().__str__() + after * (self.unit == FRACTION)
        unit = "batch" if self.unit == "batches" else self.unit.removesuffix("s")
        return f"every {unit.replace('_', ' ')}{after}"

    @property
    def _rule(self) -> str:
        return super()._rule + ("" if self.after is None else f" after {self.after}")

    def due_after(self, count: float) -> float:
        """Return the next multiple that is not before `after`."""
        (interval,), slack = self.in_units(self.values), 1e-9 if self.unit == FRACTION else 0
        number = floor(count / interval + slack) + 1 if slack else count // interval + 1
        if self.after is not None:
            number = max(number, ceil(self.in_units([self.after])[0] / interval - slack))
        while slack and _up(number * interval) <= count:  # several multiples in one step
            number += 1
        return _up(number * interval) if slack else number * interval

    def shorten(self) -> None:
        """Be due as early as possible, for a rehearsal."""
        super().shorten()
        self.after = None

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return the number of multiples from `after` on."""
        if self.unit not in totals:
            return None
        before = 0 if self.after is None else ceil(round(self.after / self.values[0], 6)) - 1
        return max(0, int(round(totals[self.unit] / self.values[0], 6)) - before)


class At(Filter):
    """Once at each of the counts, such as `At(steps=100)`, `At(epochs=[1, 5])`.

    Args:
        **counter: a counter of `Every` with one count or several, such as `fraction=[0.5, 0.9]` of the run.
    """

    def __init__(self, **counter: float | Sequence[float]) -> None:
        super().__init__(counter)

    def due_after(self, count: float) -> float:
        """Return the next of the counts."""
        values = self.in_units(self.values)
        dues = list(map(_up, values)) if self.unit == FRACTION else values
        index = bisect_right(dues, count)
        return dues[index] if index < len(dues) else inf


class Once(Filter):
    """The first event of a run."""

    def __init__(self) -> None:
        super().__init__({"emissions": 1})

    def __repr__(self) -> str:
        return "Once()"

    def due_after(self, count: float) -> float:
        """Return 1 before the first event, else infinity."""
        return 1 if count == 0 else inf


def _up(steps: float) -> int:
    return ceil(round(steps, 6))  # without the rounding errors of floats


def make_filter(name: str, when: Any, counter: Mapping[str, Any], *options: str) -> Filter:
    """Return a copy of a filter, or a filter of a counter such as `steps=100`.

    Args:
        name: the class that takes the arguments, for errors.
        when: the filter, or None if there is a counter.
        counter: the arguments of `Every`.
        *options: the other keywords of the class.

    Raises:
        TypeError: neither or both of them are passed, or a keyword is unknown.
    """
    accepted = [*COUNTERS, *NO_COUNTERS, "after", *options]
    for unknown in counter.keys() - set(accepted):
        raise TypeError(f"{name} has no argument {unknown!r}.{known_names(unknown, accepted)}")
    if when is None and counter:
        return Every(**counter)
    if not isinstance(when, Filter) or counter:
        passed = ", ".join([repr(when)] * (when is not None) + [f"{key}={value!r}" for key, value in counter.items()])
        raise TypeError(
            f"{name} takes an interval, as in {name}(steps=100), or a filter, as in {name}(At(steps=[10, 100])); got "
            f"{passed or 'nothing'}."
        )
    return deepcopy(when)


class Recurrence:
    """A filter for recurring work and the moment of the last time, over several runs.

    Args:
        when: the filter; the object takes ownership.

    Attributes:
        last: the moment of the last time; -1 if there was none.
    """

    def __init__(self, when: Filter) -> None:
        self._when, self.last = when, -1
        self._origin: Progress | None = None
        self._saved: Mapping[str, Any] | None = None

    def begin(self, run: Run) -> None:
        self._when.plan(run)
        self.last, self._origin, self._saved = -1, run.origin, None

    def resume(self, run: Run, moment: Callable[[Progress], int]) -> None:
        """Continue from the saved state, or from the position of the run.

        `moment` maps the position to a number.
        """
        self._when.plan(run)
        self._origin = run.origin
        self.last = moment(run.origin) if self._saved is None else self._saved["last"]
        self._when.load_state_dict(run.origin, {} if self._saved is None else self._saved["filter"])
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the moment of the last time, and the state of the filter."""
        if self._saved is not None:  # not yet resumed
            return dict(self._saved)
        return {} if self._origin is None else {"last": self.last, "filter": self._when.state_dict(self._origin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store a state until `resume` is called."""
        self._saved = state or None


def moment(progress: Progress) -> int:
    """Return a number that changes with every batch and at the end of an epoch."""
    return progress.batches + progress.epoch


def is_unsaved(run: Run, saves: Recurrence) -> bool:
    """True if the end of a training needs a save.

    That is if there were batches since the last save, if a validation is pending, or if a stop was vetoed before.
    """
    control, is_trained = run.control, run.progress.batches > run.origin.batches
    has_stopped = control.stopped and control.stop_request is not None and control.stop_request.vetoed
    return moment(run.progress) != saves.last or (is_trained and control.should_validate) or bool(has_stopped)
