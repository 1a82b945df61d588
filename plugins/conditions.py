"""Conditions of plugins: `EMA().when(Between(epochs=(2, 5)))` is called only while its condition holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from ..events import Event, Run
from ..events import catalogue as ev
from ..events.bus import Gate, When
from ..events.checks import describe, known_names
from ..events.signatures import check_filter
from .filters import Between, Filter

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


class Condition:
    """What must hold for a plugin to be called.

    Args:
        former: what must hold besides; None for nothing.
        function: of the run, or a `Between`; None for none.
        phases: the phases that it is called in; empty for all.
        sets: of evaluations, the sets of whose batches it is called; empty for all.

    Attributes:
        rules: each function, and the text of each `Between`: what is compared at a resume.
    """

    def __init__(
        self, former: Condition | None, function: When | None, phases: Sequence[str], sets: Sequence[str]
    ) -> None:
        if function is None and not phases and not sets:
            raise TypeError("when() takes a function of the run, phases= or sets=: when(phases=('validation',)).")
        if function is not None:
            _check_function(function)
        known = get_args(ev.Phase)
        for name in _names("phases", phases):
            if name not in known:
                raise ValueError(f"There is no phase {name!r}.{known_names(name, known)}")
        self._functions: tuple[When, ...] = () if former is None else former._functions
        if function is not None:
            self._functions += (deepcopy(function) if isinstance(function, Filter) else function,)
        self.phases: tuple[str, ...] = _both("phases", () if former is None else former.phases, phases)
        self.sets: tuple[str, ...] = _both("sets", () if former is None else former.sets, _names("sets", sets))
        self.rules = [str(each) if isinstance(each, Filter) else each for each in self._functions]

    @property
    def is_planned(self) -> bool:
        """Whether it holds from one count to another, so that its user expects it to hold at some time."""
        return any(isinstance(each, Between) and each.unit != "seconds" for each in self._functions)

    def holds(self, run: Run) -> bool:
        """Return whether it holds now, whatever the set."""
        return (not self.phases or run.phase in self.phases) and all(_ask(each, run) for each in self._functions)

    def __str__(self) -> str:
        return "only " + " and ".join(self._words())

    def _words(self) -> Iterator[str]:
        for each in self._functions:
            if isinstance(each, Between):
                low, high = each.values
                yield f"from {low} to {high} {each.unit.replace('_', ' ')}"
            else:
                yield f"while {_called(each)} holds"
        if self.phases:
            yield f"in {' or '.join(self.phases)}"
        if self.sets:
            yield f"for batches of {' and '.join(map(repr, self.sets))}"


class ConditionGate:
    """The condition of a plugin at work: it decides before each handler, and splits no window and no evaluation.

    Asked before the plugin's first handler of a window of micro-batches, the condition counts for the rest of it, down
    to `StepEnd`; and likewise for a validation or test.

    Args:
        condition: of the plugin.
        agrees_as: the name of a plugin for which the condition must say the same on all ranks; None for another.

    Attributes:
        passed: whether the condition has held in this training.
        seen: the sets whose batches came.
    """

    def __init__(self, condition: Condition, agrees_as: str | None) -> None:
        self.condition, self.passed = condition, False
        self.seen: set[str] = set()
        self._agrees_as, self._noted = agrees_as, False
        self._origin: Any = None
        self._window: bool | None = None
        self._used = -1  # the batch that the decision counted for last
        self._evaluation: tuple[tuple[Any, ...], bool] | None = None

    def reset(self) -> None:
        """Forget a former training."""
        self.passed, self._noted = False, False
        self.seen.clear()

    def of(self, event: type[Event]) -> Gate | None:
        """Return what decides before a handler of an event; None where it is always called."""
        if event in ALWAYS:
            return None
        if event in OF_WINDOWS:
            return self._for_window
        return self._for_evaluation if event in OF_EVALUATIONS else self._for_one

    def _for_one(self, run: Run, event: Event) -> bool:
        holds = bool(self.condition.holds(run))
        self.passed = self.passed or holds
        if self._agrees_as is not None and holds != self._noted and type(event) in SHARED:
            self._noted = holds
            run.control.note_condition(f"{self._agrees_as} {holds}")
        return holds

    def _for_window(self, run: Run, event: Event) -> bool:
        self._begin(run)
        earlier = max(
            0, run.stepping.window - (type(event) in AFTER_BACKWARD)
        )  # micro-batches, each of a batch of its own
        if self._window is None or self._used < run.progress.batches - earlier:
            self._window = self._for_one(run, event)
        self._used = run.progress.batches
        return self._window

    def _for_evaluation(self, run: Run, event: Event) -> bool:
        self._begin(run)
        place = run.phase, run.progress.validations, run.progress.batches
        if self._evaluation is None or self._evaluation[0] != place:
            self._evaluation = place, self._for_one(run, event)
        dataset = getattr(event, "dataset", None)
        if dataset is None or not self.condition.sets:
            return self._evaluation[1]
        self.seen.add(dataset)
        return self._evaluation[1] and dataset in self.condition.sets

    def _begin(self, run: Run) -> None:
        """Forget what was decided in another run, or before a resume."""
        if run.origin is not self._origin:
            self._origin, self._window, self._evaluation = run.origin, None, None


def _check_function(function: Any) -> None:
    check_filter("when()", function)
    if isinstance(function, Filter) and (not isinstance(function, Between) or function.unit == "emissions"):
        raise TypeError(
            f"when() takes what holds for some time, and {type(function).__name__}({function.unit}=...) lets single "
            f"events through: give it to one handler, @on(..., when={type(function).__name__}(...))."
        )


def _ask(function: When, run: Run) -> bool:
    try:
        return bool(function(run))
    except Exception as error:
        error.add_note(f"heliograph: in {_called(function)}, the condition that when() was given")
        raise


def _called(function: When) -> str:
    """Return the name of a function, and where it is written."""
    name, code = describe(function).rpartition(".")[2], getattr(function, "__code__", None)
    return name if code is None else f"{name} (line {code.co_firstlineno} of {Path(code.co_filename).name})"


def _names(what: str, given: Any) -> Sequence[str]:
    if isinstance(given, str):
        raise TypeError(f"when({what}=...) takes a tuple, ({given!r},), got {given!r}.")
    return tuple(given)


def _both(what: str, former: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that two conditions have in common, where each has some."""
    both = [name for name in former or names if name in (names or former)]
    if former and names and not both:
        raise ValueError(f"when({what}={tuple(names)}) never holds together with when({what}={tuple(former)}).")
    return tuple(both)
