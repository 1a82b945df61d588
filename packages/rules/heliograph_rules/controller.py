"""The plugin that evaluates a rule file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import heliograph as h
from heliograph.events import CATALOGUE, Event

from .active_rules import ActiveRules
from .base import RuleMetric, RuleOperation
from .files.builder import Builder
from .files.config import Source, read_rules
from .files.specs import ON_ERROR, OnError
from .operations.requests import Function

STARTS = (h.TrainStart, h.ValidationStart, h.TestStart, h.PredictStart)
ALL_BUT_SAVE_POINT = tuple(kind for kind in CATALOGUE if kind is not h.SavePoint)


class RuleController(h.Plugin):
    """Steer a run by the rules in a file.

    A rule file is the YAML of the fms-hf-tuning trainer controller: metrics, operations, and controllers with triggers,
    a rule and a patience. `docs/packages/rules.md` lists all keys.
    Rules are evaluated after the schedules. A rule at the end of
    an epoch that reads a value of a scheduled log or validation is evaluated after that log or validation.

    Args:
        source: the path of a rule file, a mapping of the same form, a `RuleSet`, or a list of `RuleSpec`.
        metrics: metric classes that the file may name, in addition to registered and installed ones.
        operations: operation classes that the file may name, in addition to registered and installed ones.
        functions: functions that the file may name, by name, in addition to registered ones.
        on_error: what a failing rule does unless it has its own setting: `raise` fails the run; `warn` logs once, and
            the rule counts as false; `disable` logs, and switches the rule off for the rest of the run.

    Raises:
        FileNotFoundError: the file does not exist.
        IsADirectoryError: the path is a folder.
        ImportError: a dependency of the rules is not installed.
        RuleError: the rules are invalid; the message has the file, line, controller and column.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.

    Attributes:
        plan: the checked rules.
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
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}.")
        rules = read_rules(source)
        self.plan = Builder(
            rules, metrics=metrics, operations=operations, functions=functions, on_error=on_error
        ).blueprint()
        self.asks, self.needs = self.plan.asks, self.plan.needs
        handled = {*STARTS, h.CheckpointLoaded, *self.plan.events}
        self.ignores = tuple(kind for kind in CATALOGUE if kind not in handled)
        self._active = ActiveRules(self.plan)
        self._changes: list[str] = []

    def describe(self, run: h.Run) -> str:
        """Return the number of rules and their file."""
        return f"follows {len(self.plan.controllers)} rules" + f" of {self.plan.file}" * (self.plan.file is not None)

    @h.on(*ALL_BUT_SAVE_POINT, lane=h.Lane.PERSIST)
    def handle(self, run: h.Run, event: Event) -> None:
        """Compute the metrics of the event, and evaluate the rules that it triggers."""
        if isinstance(event, h.TrainStart) or (isinstance(event, STARTS) and run.optimizer is None):
            self._active, self._changes = ActiveRules(self.plan), []
        if isinstance(event, h.CheckpointLoaded):
            self._note_changes(run)
            self._active.repeat_stop_after_resume(run)
        self._active.handle(run, event)
        if isinstance(event, h.CheckpointLoaded) and event.path is not None:  # the state does not include this event
            self._active.handle(run, h.CheckpointSaved(event.path, is_best=event.path == run.checkpoints.best))

    @h.on(h.SavePoint, lane=h.Lane.DECIDE, optional=True)
    def handle_before_saving(self, run: h.Run, event: Event) -> None:
        """Handle a `SavePoint` before the state is stored."""
        self._active.handle(run, event)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of metrics, operations and patience, and a stop that a rule requested."""
        return self._active.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the rules that did not change since."""
        self._active = ActiveRules(self.plan)
        self._changes = self._active.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_active": self._active.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._active = ActiveRules(self.plan)
        self._active.load_state_dict(state["_active"])

    def _note_changes(self, run: h.Run) -> None:
        if self._changes:
            run.note(f"{self.name}: rules differ from the checkpoint: {'; '.join(self._changes)}")
            self._changes = []
