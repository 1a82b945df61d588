"""Steer a run by a file of rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from heliograph import (
    CheckpointLoaded,
    CheckpointSaved,
    Lane,
    Plugin,
    PredictStart,
    Run,
    SavePoint,
    TestStart,
    TrainStart,
    ValidationStart,
    on,
)
from heliograph.events import CATALOGUE, Event

from .active_rules import ActiveRules
from .base import RuleMetric, RuleOperation
from .errors import show
from .files.builder import Given, build
from .files.config import Source, read_rules
from .files.specs import ON_ERROR, OnError
from .operations.requests import Function

T = TypeVar("T", RuleMetric, RuleOperation)
BEGINNINGS = (TrainStart, ValidationStart, TestStart, PredictStart)
OTHERS = tuple(kind for kind in CATALOGUE if kind is not SavePoint)


class RuleController(Plugin):
    """Steer a run by the rules in a file.

    A rule file is the YAML of the fms-hf-tuning trainer controller, unchanged: metrics, operations, and controllers
    with triggers, a rule and a patience; `docs/rules.md` lists all that it can contain. Rules are evaluated after the
    schedules: one at the end of an epoch that reads a value of a log or validation, while that is due, is asked when
    it is done.

    Args:
        source: the path of a rule file, a mapping of the same form, a `RuleSet`, or a list of `RuleSpec`.
        metrics: further classes that it may name, besides those that `register_metric` and installed packages know.
        operations: further classes that it may name, besides those that `register_operation` and packages know.
        functions: functions that it may call by these names, besides those that `register_function` knows.
        on_error: what comes of a rule that fails, unless it says so itself: `raise` fails the run; `warn` is logged
            once, and the rule counts as false; `disable` is logged, and the rule is off for the rest of the run.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
        ImportError: the extra `rules` is not installed.
        RuleError: something is wrong with the rules; says the file, the line, the controller and the column.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range.

    Attributes:
        plan: the rules as they were checked.
    """

    def __init__(
        self,
        source: Source,
        *,
        metrics: Iterable[type[RuleMetric]] = (),
        operations: Iterable[type[RuleOperation]] = (),
        functions: Mapping[str, Function] | None = None,
        on_error: OnError = "warn",
    ) -> None:
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error is one of {', '.join(ON_ERROR)}, got {on_error!r}.")
        given = Given(
            metrics=_check(metrics, RuleMetric, "metrics"),
            operations=_check(operations, RuleOperation, "operations"),
            functions=_check_functions({} if functions is None else functions),
            on_error=on_error,
        )
        self.plan = build(read_rules(source), given)
        self.asks, self.needs = self.plan.asks, self.plan.needs
        handled = {*BEGINNINGS, CheckpointLoaded, *self.plan.events}
        self.ignores = tuple(kind for kind in CATALOGUE if kind not in handled)
        self._active = ActiveRules(self.plan)
        self._news: list[str] = []

    def describe(self, run: Run) -> str:
        """Say how many rules there are, and where."""
        return f"follows {len(self.plan.controllers)} rules" + f" of {self.plan.file}" * (self.plan.file is not None)

    @on(*OTHERS, lane=Lane.PERSIST)
    def handle(self, run: Run, event: Event) -> None:
        """Compute the new values of the event, and ask the rules that it triggers."""
        if isinstance(event, TrainStart) or (isinstance(event, BEGINNINGS) and run.optimizer is None):
            self._active, self._news = ActiveRules(self.plan), []
        if isinstance(event, CheckpointLoaded):
            self._emit_news(run)
            self._active.repeat_stop_after_resume(run)
        self._active.take(run, event)
        if isinstance(event, CheckpointLoaded) and event.path is not None:  # emitted after the state that it holds
            self._active.take(run, CheckpointSaved(event.path, is_best=event.path == run.checkpoints.best))

    @on(SavePoint, lane=Lane.DECIDE, optional=True)
    def handle_before_saving(self, run: Run, event: Event) -> None:
        """Do so before the state is stored."""
        self._active.take(run, event)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics, the operations, what the rules have counted, and the stop that one of them asked for."""
        return self._active.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, with whatever of the rules is as it was."""
        self._active = ActiveRules(self.plan)
        self._news = self._active.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_active": self._active.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._active = ActiveRules(self.plan)
        self._active.load_state_dict(state["_active"])

    def _emit_news(self, run: Run) -> None:
        """Note where the rules are not those of the checkpoint."""
        if self._news:
            run.note(f"{self.name}: not as in the checkpoint: {'; '.join(self._news)}")
            self._news = []


def _check(kinds: Iterable[type[T]], base: type[T], argument: str) -> tuple[type[T], ...]:
    checked = list(kinds) if isinstance(kinds, Iterable) else None
    if checked is None or not all(isinstance(each, type) and issubclass(each, base) for each in checked):
        kind = base.__name__
        raise TypeError(f"{argument}= of RuleController takes a list of subclasses of {kind}, got {show(kinds)}.")
    return tuple(checked)


def _check_functions(functions: Mapping[str, Function]) -> dict[str, Function]:
    if not isinstance(functions, Mapping) or not all(
        isinstance(name, str) and callable(each) for name, each in functions.items()
    ):
        raise TypeError(f"functions= of RuleController takes a dict of functions by name, got {show(functions)}.")
    return dict(functions)
