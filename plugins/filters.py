"""Filters for any event, on any counter: `bus.on(StepEnd, f, when=Every(steps=10))`, `@on(StepEnd, when=Once())`.

All are evaluated on absolute counters, from where the run began: a resumed run neither drifts nor fires twice. One that
could not be asked in time (its plugin was off) catches up once. What is due, and how often a filter was asked, is kept
in checkpoints for the handlers of plugins; a bare function has no name to keep it under.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any

from ..events import Progress, Run
from ..events.checks import check_number, check_whole_number, known_names

COUNTERS = {
    "batches": "batches",
    "epochs": "epoch",
    "samples": "samples",
    "seconds": "seconds",
    "skipped_steps": "skipped_steps",
    "steps": "steps",
    "validations": "validations",
}


SOON = 1e-9  # seconds


class Filter(ABC):
    """Lets an event through where one counter has reached or passed the next due value.

    Attributes:
        passed: whether it has let one through in this training.
    """

    def __init__(self, counters: dict[str, float | Sequence[float]]) -> None:
        if len(counters) != 1:
            given = ", ".join(counters) or "none"
            raise ValueError(f"{type(self).__name__} takes exactly one counter, got {given}: Every(steps=100), say.")
        self.unit, given_value = next(iter(counters.items()))
        if self.unit not in COUNTERS and self.unit != "emissions":
            raise ValueError(f"Unknown counter {self.unit!r}.{known_names(self.unit, [*COUNTERS, 'emissions'])}")
        values: list[Any] = [given_value]
        if isinstance(given_value, Iterable) and not isinstance(given_value, str):
            values = list(given_value)
        if not values:
            raise ValueError(f"{type(self).__name__}({self.unit}=...) takes at least one number.")
        what = f"The argument of {type(self).__name__}({self.unit}=...)"
        if self.unit == "seconds":
            self.values = sorted(check_number(what, value, more_than=0) for value in values)
        else:
            self.values = sorted(check_whole_number(what, value, at_least=1) for value in values)
        self._origin: Progress | None = None
        self.passed = False
        self._due: float = inf
        self._emissions = 0
        self._count: Callable[[Progress], float]
        if self.unit == "emissions":
            self._count = self._next_emission
        else:
            self._count = attrgetter(COUNTERS[self.unit])

    def __call__(self, run: Run) -> bool:
        """Return whether the event passes."""
        if run.origin is not self._origin:
            self.load_state_dict(run.origin, {})
        count = self._count(run.progress)
        if count < self._due:
            return False
        self._due, self.passed = self.due_after(count), True
        return True

    @abstractmethod
    def due_after(self, count: float) -> float:
        """Return the next due value above `count`."""

    def shorten(self) -> None:
        """Be due at the first occasion, as in a rehearsal, which does not last until the true one."""
        self.values = [SOON if self.unit == "seconds" else 1]

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return how often it would be due in a run; None where that is not known.

        Args:
            totals: what the run would count, such as `{"steps": 1000, "epochs": 10}`.
        """
        return sum(value <= totals[self.unit] for value in self.values) if self.unit in totals else None

    def __str__(self) -> str:
        return self._rule

    @property
    def _rule(self) -> str:
        """The text by which a saved state is matched with its filter: it never changes."""
        return f"{type(self).__name__.lower()} {', '.join(map(str, self.values))} {self.unit}"

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

    def _next_emission(self, progress: Progress) -> float:
        self._emissions += 1
        return self._emissions


class Every(Filter):
    """Every n of one counter: `Every(steps=100)`, `Every(seconds=60)`, `Every(emissions=3)`."""

    def __init__(self, **counter: float) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 1:
            raise ValueError(f"Every({self.unit}=...) takes one number, got {self.values}; At takes several.")

    def __str__(self) -> str:
        unit = "batch" if self.unit == "batches" else self.unit.removesuffix("s")
        return f"every {unit.replace('_', ' ')}" if self.values == [1] else super().__str__()

    def due_after(self, count: float) -> float:
        """Return the next multiple."""
        return (count // self.values[0] + 1) * self.values[0]

    def times(self, totals: Mapping[str, float]) -> int | None:
        """Return how many multiples there are."""
        return int(totals[self.unit] // self.values[0]) if self.unit in totals else None


class At(Filter):
    """Once at each of the given counts: `At(steps=100)`, `At(epochs=[1, 5])`."""

    def __init__(self, **counter: float | Sequence[float]) -> None:
        super().__init__(counter)

    def due_after(self, count: float) -> float:
        """Return the next of the counts."""
        index = bisect_right(self.values, count)
        return self.values[index] if index < len(self.values) else inf


class Between(Filter):
    """Always while the counter lies between two counts, both included: `Between(epochs=(2, 5))`."""

    def __init__(self, **counter: tuple[float, float]) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 2:
            raise ValueError(f"Between({self.unit}=...) takes two numbers, got {self.values}.")

    def __call__(self, run: Run) -> bool:
        """Return whether the event passes."""
        if run.origin is not self._origin:
            self.load_state_dict(run.origin, {})
        passes = self.values[0] <= self._count(run.progress) <= self.values[1]
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

    def due_after(self, count: float) -> float:
        """Return 1, then nothing."""
        return 1 if count == 0 else inf
