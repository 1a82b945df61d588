"""Filters for any event, on any counter: `bus.on(StepEnd, f, when=Every(steps=10))`, `@on(StepEnd, when=Once())`.

All are evaluated on absolute counters, from where the run began: a resumed run neither drifts nor fires twice. One that
could not be asked in time (its plugin was off) catches up once. What is due, and how often a filter was asked, is kept
in checkpoints for the handlers of plugins; a bare function has no name to keep it under.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from math import ceil, floor, inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from ..events import Progress, Run
from ..events.checks import check_number, check_whole_number, known_names

if TYPE_CHECKING:
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
READ = {unit: attrgetter(attribute) for unit, attribute in COUNTERS.items()}  # one for all: alarms are sorted by them

FRACTION = "fraction"  # of the planned steps of the run, rounded up to a step
NO_COUNTERS = ("emissions", FRACTION)  # of `Progress`
EXACT = ("batches", "epochs", "steps")  # counters of which the end is known
SOON = 1e-9  # seconds


class Filter(ABC):
    """Lets an event through where one counter has reached or passed the next due value.

    Attributes:
        passed: whether it has let one through in this training.
    """

    def __new__(cls, *unnamed: Any, **_counters: Any) -> Self:
        if unnamed:
            raise TypeError(f"{cls.__name__} takes a counter by its name, as in {cls.__name__}(steps={unnamed[0]!r}).")
        return super().__new__(cls)

    def __init__(self, counters: dict[str, float | Sequence[float]]) -> None:
        if len(counters) != 1:
            given = ", ".join(counters) or "none"
            raise ValueError(f"{type(self).__name__} takes exactly one counter, got {given}: Every(steps=100), say.")
        self.unit, given_value = next(iter(counters.items()))
        if self.unit not in COUNTERS and self.unit not in NO_COUNTERS:
            raise ValueError(f"Unknown counter {self.unit!r}.{known_names(self.unit, [*COUNTERS, *NO_COUNTERS])}")
        values: list[Any] = [given_value]
        if (
            isinstance(given_value, Iterable)
            and not isinstance(given_value, str)
            and getattr(given_value, "ndim", True)
        ):
            values = list(given_value)  # a tensor of one number is an Iterable that cannot be iterated over
        if not values:
            raise ValueError(f"{type(self).__name__}({self.unit}=...) takes at least one number.")
        self.values = sorted(self._check(f"The argument of {type(self).__name__}({self.unit}=...)", values))
        self._planned: int | None = None  # steps, of which a fraction is counted
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

    def _check(self, what: str, values: Iterable[Any]) -> list[float]:
        if self.unit == FRACTION:
            return [check_number(what, value, more_than=0, at_most=1) for value in values]
        if self.unit == "seconds":
            return [check_number(what, value, more_than=0) for value in values]
        return [check_whole_number(what, value, at_least=1) for value in values]

    @staticmethod
    def plan_all(run: Run) -> None:
        """Let the filters of all handlers take the length of a run that begins.

        Raises:
            ValueError: one counts fractions, and the length is not known.
        """
        for signal in run.bus.signals():
            for subscription in signal.subscriptions.values():
                if isinstance(subscription.when, Filter):
                    subscription.when.plan(run)

    def plan(self, run: Run) -> None:
        """Take the length of a run that begins, if this counts fractions of it.

        Raises:
            ValueError: the length is not known.
        """
        if self.unit == FRACTION:
            self._planned, self._counts_skips = run.length.planned_steps, run.length.max_epochs is not None
            if self._planned is None and run.optimizers:  # in an evaluation there is nothing to count
                kind = type(self).__name__
                raise ValueError(
                    f"{kind}({FRACTION}=...) needs the number of optimizer steps of the run before it begins, and "
                    f"{run.length.unknown}; or count something else, as in {kind}(steps=100)."
                )

    def in_units(self, values: Iterable[float]) -> list[float]:
        """Return values in the unit of the counter: fractions of the run as steps, which are not rounded."""
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
        """What says which count it waits for, so that the bus need not ask it before; None where it must be asked.

        A handler may set the clock for those after it, as a recorder does, so seconds are always asked for.
        """
        asks_more = self.unit in ("emissions", "seconds") or type(self).__call__ is not Filter.__call__
        return None if asks_more else self._next_due

    def _next_due(self, run: Run) -> Alarm:
        count = READ[self.unit] if isinstance(self._count, attrgetter) else self._count  # that of a copy is a copy
        return count, self._due if run.origin is self._origin else -inf

    @abstractmethod
    def due_after(self, count: float) -> float:
        """Return the next due value above `count`."""

    def shorten(self) -> None:
        """Be due at the first occasion, as in a rehearsal, which does not last until the true one."""
        if self.unit == FRACTION:
            self.unit, self._count = "steps", attrgetter("steps")
        self.values = [SOON if self.unit == "seconds" else 1]

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return how often it would be due in a run; None where that is not known.

        Args:
            totals: what the run would count, such as `{"steps": 1000, "epochs": 10}`.
        """
        return sum(value <= totals[self.unit] for value in self.values) if self.unit in totals else None

    def is_due_at_end(self, totals: Mapping[str, float]) -> bool:
        """Return whether it would be due at the last step of a run, as far as that is known; see `times`."""
        end = totals.get(self.unit)
        return end is not None and self.unit in EXACT and self.due_after(end - 1) == end

    def __repr__(self) -> str:
        """Return what makes such a filter, such as `Every(steps=100)`."""
        values = getattr(self, "values", [])  # none yet in one that is half made
        given = {self.unit: values[0] if len(values) == 1 else tuple(values)} if values else {}
        given |= {"after": after} if (after := getattr(self, "after", None)) is not None else {}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __str__(self) -> str:
        values = ", ".join(map(str, self.values))
        return f"{type(self).__name__.lower()} {values} of the run" if self.unit == FRACTION else self._rule

    @property
    def _rule(self) -> str:
        """The text by which a saved state is matched with its filter: it never changes."""
        of = f" of {self._planned} steps" if self._planned else ""
        return f"{type(self).__name__.lower()} {', '.join(map(str, self.values))} {self.unit}{of}"

    def state_dict(self, origin: Progress) -> dict[str, Any]:
        """Return what `load_state_dict` takes.

        Args:
            origin: the `run.origin` of the run that the state is of.
        """
        if origin is not self._origin:  # not called in this run yet
            self.load_state_dict(origin, {})
        return {"rule": self._rule, "due": self._due, "emissions": self._emissions}

    def load_state_dict(self, origin: Progress, state: Mapping[str, Any]) -> None:
        """Continue in a resumed run; without a state, begin where the run began.

        A filter that was changed since applies its new rule at once.

        Args:
            origin: the `run.origin` of the resumed run.
            state: what `state_dict` returned.
        """
        self._origin = origin
        self._emissions = state.get("emissions", 0)
        counts = {"emissions": self._emissions, "seconds": origin.earlier_seconds}  # the origin's own clock runs
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
    """Every n of one counter: `Every(steps=100)`, `Every(seconds=60)`, `Every(fraction=0.1)` of the run.

    Args:
        after: in the same unit; nothing before it. `Every(steps=100, after=1000)` begins with step 1000.
        **counter: one of `batches`, `epochs`, `samples`, `seconds`, `skipped_steps`, `steps`, `validations`,
            `emissions` of the event, `fraction` of the optimizer steps that the run plans.

    Raises:
        ValueError: not one counter, or a number that is not positive; in a run, the length that a fraction is of is not
            known.
    """

    def __init__(self, *, after: float | None = None, **counter: float) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 1:
            raise ValueError(f"Every({self.unit}=...) takes one number, got {self.values}; At takes several.")
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
        """Return the next multiple, which is not before `after`."""
        (interval,), slack = self.in_units(self.values), 1e-9 if self.unit == FRACTION else 0
        number = floor(count / interval + slack) + 1 if slack else count // interval + 1
        if self.after is not None:
            number = max(number, ceil(self.in_units([self.after])[0] / interval - slack))
        while slack and _up(number * interval) <= count:  # several in one step
            number += 1
        return _up(number * interval) if slack else number * interval

    def shorten(self) -> None:
        """Be due at the first occasion."""
        super().shorten()
        self.after = None

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return how many multiples there are, from `after` on."""
        if self.unit not in totals:
            return None
        before = 0 if self.after is None else ceil(round(self.after / self.values[0], 6)) - 1
        return max(0, int(round(totals[self.unit] / self.values[0], 6)) - before)


class At(Filter):
    """Once at each of the given counts: `At(steps=100)`, `At(epochs=[1, 5])`, `At(fraction=[0.5, 0.9])` of the run.

    Args:
        **counter: one of those of `Every`.
    """

    def __init__(self, **counter: float | Sequence[float]) -> None:
        super().__init__(counter)

    def due_after(self, count: float) -> float:
        """Return the next of the counts."""
        values = self.in_units(self.values)
        dues = list(map(_up, values)) if self.unit == FRACTION else values
        index = bisect_right(dues, count)
        return dues[index] if index < len(dues) else inf


class Between(Filter):
    """Always while the counter lies between two counts, both included: `Between(epochs=(2, 5))`."""

    def __init__(self, **counter: tuple[float, float]) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 2:
            raise ValueError(f"Between({self.unit}=...) takes two numbers, got {self.values}.")

    def _check(self, what: str, values: Iterable[Any]) -> list[float]:
        checked = super()._check(what, values)
        if checked != sorted(checked):
            raise ValueError(f"{what} is the lower count, then the higher one; got {tuple(checked)}.")
        return checked

    def __call__(self, run: Run) -> bool:
        """Return whether the event passes."""
        if run.origin is not self._origin:
            self._begin(run)
        low, high = self.values
        if self.unit == FRACTION:
            low, high = (round(value, 6) for value in self.in_units(self.values))
        passes = low <= self._count(run.progress) <= high
        self.passed = self.passed or passes
        return passes

    def due_after(self, count: float) -> float:
        """Return the lower end."""
        return self.values[0]

    def shorten(self) -> None:
        """Be between nothing and everything."""
        self.values = [0, inf]

    def times(self, totals: Mapping[str, float]) -> None:
        """Return None: how often it is asked is not known."""


class Once(Filter):
    """The first time in a run."""

    def __init__(self) -> None:
        super().__init__({"emissions": 1})

    def __repr__(self) -> str:
        return "Once()"

    def due_after(self, count: float) -> float:
        """Return 1, then nothing."""
        return 1 if count == 0 else inf


def _up(steps: float) -> int:
    """Return a number of steps rounded up, but for what a float is off."""
    return ceil(round(steps, 6))


def make_filter(name: str, when: Any, counter: Mapping[str, Any], *options: str) -> Filter:
    """Return a filter as it was given, or that of a counter such as `steps=100`.

    Args:
        name: of the class that is given it, for errors.
        when: the filter; None where there is a counter.
        counter: the arguments of `Every`.
        *options: the other keywords of the class.

    Raises:
        TypeError: neither is given, or both; a keyword is not known.
    """
    known = [*COUNTERS, *NO_COUNTERS, "after", *options]
    for unknown in counter.keys() - set(known):
        raise TypeError(f"{name} has no argument {unknown!r}.{known_names(unknown, known)}")
    if when is None and counter:
        return Every(**counter)
    if not isinstance(when, Filter) or counter:
        given = ", ".join([repr(when)] * (when is not None) + [f"{key}={value!r}" for key, value in counter.items()])
        raise TypeError(
            f"{name} takes an interval, as in {name}(steps=100), or a filter, as in {name}(At(steps=[10, 100])); got "
            f"{given or 'nothing'}."
        )
    return deepcopy(when)


class Recurrence:
    """A filter that says when something is due, and the moment at which it was last done; one run after another.

    Args:
        when: the filter, which belongs to this object then.

    Attributes:
        last: the moment at which it was last done, -1 where it was not.
    """

    def __init__(self, when: Filter) -> None:
        self._when, self.last = when, -1
        self._origin: Progress | None = None
        self._saved: Mapping[str, Any] | None = None

    def begin(self, run: Run) -> None:
        """Forget the former run; ValueError where the filter does not fit this one."""
        self._when.plan(run)
        self.last, self._origin, self._saved = -1, run.origin, None

    def resume(self, run: Run, moment: Callable[[Progress], int]) -> None:
        """Continue from what was saved, or from where the run is, as `moment` counts."""
        self._when.plan(run)
        self._origin = run.origin
        self.last = moment(run.origin) if self._saved is None else self._saved["last"]
        self._when.load_state_dict(run.origin, {} if self._saved is None else self._saved["filter"])
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return when it was last done, and what is due next."""
        if self._saved is not None:  # not taken over yet
            return dict(self._saved)
        return {} if self._origin is None else {"last": self.last, "filter": self._when.state_dict(self._origin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the run has its new origin."""
        self._saved = state or None


def moment(progress: Progress) -> int:
    """Return a number that the end of an epoch changes, too: the state is another one after it."""
    return progress.batches + progress.epoch


def is_unsaved(run: Run, saves: Recurrence) -> bool:
    """True if the end of a training differs from its last save, or if a validation or an effective stop is new."""
    control, is_trained = run.control, run.progress.batches > run.origin.batches
    has_stopped = control.stopped and control.stop_request is not None and control.stop_request.vetoed
    return moment(run.progress) != saves.last or (is_trained and control.should_validate) or bool(has_stopped)
