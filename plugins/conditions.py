"""Conditions of plugins, such as `EMA().when(Between(epochs=(2, 5)))`, and the filter of a range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from math import inf
from pathlib import Path
from typing import Any, get_args

from ..events import Event, Run
from ..events import catalogue as ev
from ..events.bus import Gate, When
from ..events.checks import describe, known_names
from ..events.signatures import check_filter
from .filters import FRACTION, Filter

ALWAYS = frozenset({ev.TrainStart, ev.CheckpointLoaded, ev.RunFailed, ev.RunClosed})  # to set up, continue, clean up
AFTER_BACKWARD = (ev.BackwardEnd, ev.GradientsReady, ev.StepEnd)
OF_WINDOWS = (ev.BatchStart, ev.ForwardEnd, *AFTER_BACKWARD)
OF_EVALUATIONS = frozenset({
    ev.ValidationStart, ev.ValidationBatchStart, ev.ValidationBatchEnd, ev.ValidationEnd, ev.ValidationCut,
    ev.TestStart, ev.TestBatchStart, ev.TestBatchEnd, ev.TestEnd,
    ev.PredictStart, ev.PredictBatchStart, ev.PredictBatchEnd, ev.PredictEnd,
})  # fmt: skip
OF_LOOP = frozenset({
    ev.EpochStart, ev.BatchEnd, ev.Log, ev.SavePoint, ev.ShouldStop, ev.EpochEnd, ev.LastBoundary, ev.TrainEnd,
})  # fmt: skip
SHARED = OF_LOOP | OF_EVALUATIONS | set(OF_WINDOWS)  # emitted on every rank, in the same order


class Between(Filter):
    """While a counter is in a range, both ends included: `Between(epochs=(2, 5))`.

    Args:
        **counter: a counter of `Every` with the lower and the upper end.
    """

    def __init__(self, **counter: tuple[float, float]) -> None:
        super().__init__(dict(counter))
        if len(self.values) != 2:
            raise ValueError(f"Between({self.unit}=...) takes two numbers, got {self.values}.")

    def _check(self, argument: str, values: Iterable[Any]) -> list[float]:
        checked = super()._check(argument, values)
        if checked != sorted(checked):
            raise ValueError(f"{argument} takes the lower count first; got {tuple(checked)}.")
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
        """Pass every event."""
        self.values = [0, inf]

    def times(self, totals: Mapping[str, float]) -> None:
        """Return None: the number of events is unknown."""


class Condition:
    """The condition under which a plugin is called.

    Args:
        previous: a condition that must hold too, or None.
        function: a function of the run, a `Between`, or None.
        phases: the phases in which the plugin is called; empty for all.
        sets: the evaluation sets for whose batches the plugin is called; empty for all.

    Attributes:
        rules: the functions and the texts of the `Between` filters, which are compared at a resume.
    """

    def __init__(
        self, previous: Condition | None, function: When | None, phases: Sequence[str], sets: Sequence[str]
    ) -> None:
        if function is None and not phases and not sets:
            raise TypeError("when() takes a function of the run, phases= or sets=, as in when(phases=('validation',)).")
        if function is not None:
            _check_function(function)
        phase_names = get_args(ev.Phase)
        for name in _names("phases", phases):
            if name not in phase_names:
                raise ValueError(f"Unknown phase {name!r}.{known_names(name, phase_names)}")
        self._functions: tuple[When, ...] = () if previous is None else previous._functions
        if function is not None:
            self._functions += (deepcopy(function) if isinstance(function, Filter) else function,)
        self.phases: tuple[str, ...] = _common("phases", () if previous is None else previous.phases, phases)
        self.sets: tuple[str, ...] = _common("sets", () if previous is None else previous.sets, _names("sets", sets))
        self.rules = [str(rule) if isinstance(rule, Filter) else rule for rule in self._functions]

    @property
    def is_planned(self) -> bool:
        """True if the condition is a range of counts, which the run is expected to reach."""
        return any(isinstance(function, Between) and function.unit != "seconds" for function in self._functions)

    def holds(self, run: Run) -> bool:
        """Return whether the condition holds now, for any evaluation set."""
        return (not self.phases or run.phase in self.phases) and all(
            _ask(function, run) for function in self._functions
        )

    def __str__(self) -> str:
        return "only " + " and ".join(self._words())

    def _words(self) -> Iterator[str]:
        for function in self._functions:
            if isinstance(function, Between):
                low, high = function.values
                yield f"from {low} to {high} {function.unit.replace('_', ' ')}"
            else:
                yield f"while {_location(function)} holds"
        if self.phases:
            yield f"in {' or '.join(self.phases)}"
        if self.sets:
            yield f"for batches of {' and '.join(map(repr, self.sets))}"


class ConditionGate:
    """Evaluates the condition of a plugin before its handlers.

    It never splits a window or an evaluation: the value at the plugin's first handler of a window is used until
    `StepEnd`, and the value at its first handler of a validation or test until the end of that.

    Args:
        condition: the condition.
        agrees_as: the plugin's name if the condition must be equal on all ranks, else None.

    Attributes:
        passed: whether the condition has held in this training.
        seen: the sets of which batches came.
    """

    def __init__(self, condition: Condition, agrees_as: str | None) -> None:
        self.condition, self.passed = condition, False
        self.seen: set[str] = set()
        self._agrees_as, self._noted = agrees_as, False
        self._origin: Any = None
        self._window: bool | None = None
        self._used = -1  # the last batch for which `_window` was used
        self._evaluation: tuple[tuple[Any, ...], bool] | None = None

    def reset(self) -> None:
        self.passed, self._noted = False, False
        self.seen.clear()

    def unmet(self, name: str, note: Callable[[str], None]) -> Iterator[str]:
        """Yield a sentence for each reason why the plugin of this name was not called in a training.

        Args:
            name: of the plugin.
            note: called with a line if the condition never held and was not expected to.
        """
        if not self.passed:
            said = f"Plugin {name!r} was never on: it is called {self.condition}"
            if self.condition.is_planned:
                yield f"{said}."
            else:
                note(said)
        for dataset in self.condition.sets if self.seen else ():
            if dataset not in self.seen:
                yield (
                    f"Plugin {name!r} waits for batches of the set {dataset!r}, which came in no evaluation."
                    + known_names(dataset, self.seen)
                )

    def gate_for(self, event: type[Event]) -> Gate | None:
        if event in ALWAYS:
            return None
        if event in OF_WINDOWS:
            return self._for_window
        return self._for_evaluation if event in OF_EVALUATIONS else self._for_event

    def _for_event(self, run: Run, event: Event) -> bool:
        holds = bool(self.condition.holds(run))
        self.passed = self.passed or holds
        if self._agrees_as is not None and holds != self._noted and type(event) in SHARED:
            self._noted = holds
            run.control.note_condition(f"{self._agrees_as} {holds}")
        return holds

    def _for_window(self, run: Run, event: Event) -> bool:
        self._begin(run)
        earlier = max(0, run.stepping.window - (type(event) in AFTER_BACKWARD))  # micro-batches of this window
        if self._window is None or self._used < run.progress.batches - earlier:
            self._window = self._for_event(run, event)
        self._used = run.progress.batches
        return self._window

    def _for_evaluation(self, run: Run, event: Event) -> bool:
        self._begin(run)
        place = run.phase, run.progress.validations, run.progress.batches
        if self._evaluation is None or self._evaluation[0] != place:
            self._evaluation = place, self._for_event(run, event)
        dataset = getattr(event, "dataset", None)
        if dataset is None or not self.condition.sets:
            return self._evaluation[1]
        self.seen.add(dataset)
        return self._evaluation[1] and dataset in self.condition.sets

    def _begin(self, run: Run) -> None:  # of another run, or after a resume
        if run.origin is not self._origin:
            self._origin, self._window, self._evaluation = run.origin, None, None


def _check_function(function: Any) -> None:
    check_filter("when()", function)
    if isinstance(function, Filter) and (not isinstance(function, Between) or function.unit == "emissions"):
        kind = type(function).__name__
        raise TypeError(f"{kind}({function.unit}=...) passes single events: use it in @on(..., when={kind}(...)).")


def _ask(function: When, run: Run) -> bool:
    try:
        return bool(function(run))
    except Exception as error:
        error.add_note(f"heliograph: in {_location(function)}, a condition passed to when()")
        raise


def _location(function: When) -> str:
    name, code = describe(function).rpartition(".")[2], getattr(function, "__code__", None)
    return name if code is None else f"{name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"


def _names(argument: str, names: Any) -> Sequence[str]:
    if isinstance(names, str):
        raise TypeError(f"when({argument}=...) takes a tuple, ({names!r},), got {names!r}.")
    return tuple(names)


def _common(argument: str, previous: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that two conditions have in common; an empty one allows all."""
    common = [name for name in previous or names if name in (names or previous)]
    if previous and names and not common:
        raise ValueError(f"when({argument}={tuple(names)}) excludes when({argument}={tuple(previous)}).")
    return tuple(common)
