"""Builds checked rules from a rule set: creates metrics and operations once to test them, and compiles rules."""

from __future__ import annotations

import inspect
import keyword
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from heliograph import (
    CheckpointSaved,
    Log,
    PluginChanged,
    PluginFailed,
    PredictBatchEnd,
    PredictBatchStart,
    Replay,
    RunClosed,
    RunFailed,
    TestBatchEnd,
    TestBatchStart,
    ValidationBatchEnd,
    ValidationBatchStart,
    ValidationEnd,
)
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import EndTracker, RuleMetric, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleSyntaxError, RuleTypeError
from ..language import FUNCTION_NAMES, Rule
from ..operations.log_control import names_at
from ..operations.requests import Function
from ..registry import DEFAULT_OPERATIONS, metric_class, operation_class
from .config import Problems
from .specs import OnError, RulePart, RuleSet, RuleSpec
from .triggers import BEFORE_BOUNDARY, Trigger, find_trigger, needed_request


@dataclass(frozen=True)
class Additions:
    """Classes, functions and the `on_error` of a `RuleController`, in addition to registered ones."""

    metrics: tuple[type[RuleMetric], ...] = ()
    operations: tuple[type[RuleOperation], ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    on_error: OnError = "warn"


@dataclass(frozen=True)
class CheckedRule:
    """A checked controller.

    Attributes:
        spec: the rule as written.
        file: the rule file.
        rule: the compiled rule.
        triggers: when the rule is evaluated.
        actions: its actions as (operation, action).
        level: the logging level for a firing.
        on_error: what an error in the evaluation does.
        shared: whether the rule must be true on all ranks.
        waits_for: the scheduled events that a rule at the end of an epoch waits for.
        asks: the requests that its actions make.
    """

    spec: RuleSpec
    file: str | None
    rule: Rule
    triggers: tuple[Trigger, ...]
    actions: tuple[tuple[str, str], ...]
    level: int
    on_error: OnError
    shared: bool
    waits_for: frozenset[type[Event]]
    asks: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def settings(self) -> str:
        # A rule with other settings does not take over a saved state.
        spec, patience = self.spec, self.spec.patience
        patient = "" if patience is None else f" after {patience.threshold}, {patience.mode}"
        return (
            f"{', '.join(spec.triggers)}: {' '.join(self.rule.text.split())} -> {', '.join(spec.operations)}{patient}"
        )


@dataclass(frozen=True)
class Blueprint:
    """All rules of a file.

    Attributes:
        file: the rule file.
        metrics: factories by name; each run creates its own metrics.
        operations: factories by name.
        controllers: the rules in the order of the file.
        events: the events to handle.
        asks: the requests that the rules make.
        needs: the requests that other plugins must make, or a rule is never evaluated; and required data.
        asks_ranks: whether the ranks exchange their requests; a dry run has one rank.
    """

    file: str | None
    metrics: Mapping[str, Callable[[], RuleMetric]]
    operations: Mapping[str, Callable[[], RuleOperation]]
    controllers: tuple[CheckedRule, ...]
    events: frozenset[type[Event]]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    asks_ranks: bool = True


T = TypeVar("T", RuleMetric, RuleOperation)


def create(kind: type[T], name: str, arguments: Mapping[str, Any]) -> T:
    try:
        return kind(name, **deepcopy(dict(arguments)))
    except RuleError:
        raise
    except Exception as error:
        names = ", ".join(list(inspect.signature(kind).parameters)[1:]) or "none"
        text = f"Cannot create {kind.__name__} {name!r}: {str(error).removesuffix('.')}. Its arguments: {names}."
        raise (RuleTypeError if isinstance(error, TypeError) else RuleError)(text) from error


def create_bound(
    kind: type[RuleOperation], name: str, arguments: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> RuleOperation:
    operation = create(kind, name, arguments)
    operation.bind(functions)
    return operation


def check_usable(metric: RuleMetric, name: str) -> None:
    try:
        is_valid = metric.validate()
    except ValueError as error:  # with a reason
        raise RuleError(f"Metric handler {name} failed validation: {error}") from error
    if not is_valid:
        raise RuleError(f"Metric handler {name} failed validation.")
    if not metric.events and not metric.when_read:
        raise RuleError(
            f"{type(metric).__name__} would never be computed: set its events, for example events = (ValidationEnd,), "
            "or when_read = True."
        )


def check_actions(operation: RuleOperation) -> None:
    for name, action in operation.actions().items():
        try:
            inspect.signature(action).bind(None, None)
        except TypeError:
            text = f"{type(operation).__name__}.{name} is not an action: an action takes (self, run, firing)."
            raise RuleTypeError(text) from None


def check_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or "__" in name or name in FUNCTION_NAMES:
        raise RuleError(
            f"Rules cannot read a metric named {name!r}: use letters, digits and single underscores, a letter first, "
            "but not the name of a function."
        )


NOT_COLLECTIVE: tuple[type[Event], ...] = (  # emitted at different times on the ranks, or not on all of them
    PluginChanged, PluginFailed, PredictBatchEnd, PredictBatchStart, Replay, RunClosed, RunFailed,
    TestBatchEnd, TestBatchStart, ValidationBatchEnd, ValidationBatchStart,
)  # fmt: skip


def build(rules: RuleSet, additions: Additions, problems: Problems | None = None) -> Blueprint:
    """Check rules and build their blueprint; without `problems`, the first error is raised."""
    return _Building(rules, additions, problems or Problems()).blueprint()


class _Building:
    def __init__(self, rules: RuleSet, additions: Additions, problems: Problems) -> None:
        self._rules, self._additions, self._problems = rules, additions, problems
        self._metrics: dict[str, RuleMetric] = {}
        self._operations: dict[str, RuleOperation] = {}
        self._metric_makers: dict[str, Callable[[], RuleMetric]] = {}
        self._operation_makers: dict[str, Callable[[], RuleOperation]] = {}
        self._metric_names = {part.name for part in rules.metrics} | self._problems.broken
        named = {part.name for part in rules.operations}
        defaults = [RulePart(name, kind) for name, kind in DEFAULT_OPERATIONS.items() if name not in named]
        self._parts = (*defaults, *rules.operations)

    def blueprint(self) -> Blueprint:
        attempt = self._problems.attempt
        for part in self._rules.metrics:
            attempt(self._check_metric, part)
        for part in self._parts:
            attempt(self._check_operation, part)
        checked = [attempt(self._check_rule, spec) for spec in self._rules.controllers]
        controllers = tuple(rule for rule in checked if rule is not None)
        needs = {_needed_request(rule) for rule in controllers}
        needs |= {"validation data" for rule in controllers if "validation" in rule.asks}
        return Blueprint(
            file=self._rules.file,
            metrics=self._metric_makers,
            operations=self._operation_makers,
            controllers=controllers,
            events=self._handled_events(controllers),
            asks=tuple(sorted({request for rule in controllers for request in rule.asks})),
            needs=tuple(sorted(need for need in needs if need)),
        )

    def _check_metric(self, part: RulePart) -> None:
        with self._located(part.line):
            check_name(part.name)
            kind = metric_class(part.kind, self._additions.metrics)
            make = partial(create, kind, part.name, part.arguments)
            metric = make()
            check_usable(metric, part.name)
        self._metrics[part.name], self._metric_makers[part.name] = metric, make

    def _check_operation(self, part: RulePart) -> None:
        with self._located(part.line):
            if "." in part.name:
                raise RuleError(f"The name of an operation must not contain a dot, got {part.name!r}.")
            kind = operation_class(part.kind, self._additions.operations)
            make = partial(create_bound, kind, part.name, part.arguments, self._additions.functions)
            operation = make()
            check_actions(operation)
        self._operations[part.name], self._operation_makers[part.name] = operation, make

    def _check_rule(self, spec: RuleSpec) -> CheckedRule | None:
        attempt = self._problems.attempt
        triggers = [attempt(self._trigger, spec, name) for name in spec.triggers]
        valid_triggers = [trigger for trigger in triggers if trigger is not None]
        actions = [attempt(self._action, spec, name, valid_triggers) for name in spec.operations]
        rule = attempt(self._compile, spec)
        if rule is None or None in triggers or None in actions:
            return None
        valid_actions = [(self._operations[name], action) for name, action in filter(None, actions)]
        return CheckedRule(
            spec=spec,
            file=self._rules.file,
            rule=rule,
            triggers=tuple(valid_triggers),
            actions=tuple(action for action in actions if action is not None),
            level=logging.getLevelNamesMapping()[spec.log_level.upper()],
            on_error=spec.on_error or self._additions.on_error,
            shared=any(operation.shared for operation, _ in valid_actions),
            waits_for=self._waits_for(rule, valid_triggers),
            asks=tuple(_requests(valid_actions, {kind for trigger in valid_triggers for kind in trigger.events})),
        )

    def _trigger(self, spec: RuleSpec, name: str) -> Trigger:
        with self._located(spec.lines.get(name, spec.line), spec.name):
            return find_trigger(name, spec.name)

    def _compile(self, spec: RuleSpec) -> Rule:
        with self._located(spec.lines.get("rule", spec.line), spec.name):
            try:
                return Rule(str(spec.rule), self._metric_names)
            except RuleSyntaxError as error:
                problem = f"Rule for control {spec.name} is invalid: {error.problem}"
                raise RuleSyntaxError(problem, column=error.column) from error.__cause__

    def _action(self, spec: RuleSpec, name: str, triggers: list[Trigger]) -> tuple[str, str] | None:
        owner, _, action = name.partition(".")
        if owner not in self._operations and owner in {part.name for part in self._parts} | self._problems.broken:
            return None  # reported already
        with self._located(spec.lines.get(name, spec.line), spec.name):
            actions = {f"{key}.{act}" for key, operation in self._operations.items() for act in operation.actions()}
            if name not in actions:
                raise RuleKeyError(f"Invalid operation {name} for control {spec.name}.{known_names(name, actions)}")
            operation = self._operations[owner]
            for trigger, kind in ((trigger, kind) for trigger in triggers for kind in trigger.events):
                operation.check(action, self._metric_names | names_at(kind), trigger.name, kind)
                if operation.shared and kind in NOT_COLLECTIVE:
                    raise RuleError(
                        f"{name} acts on all ranks together, but the ranks do not emit {kind.__name__} at the same "
                        f"time (the trigger {trigger.name!r}): choose another trigger."
                    )
        return owner, action

    def _waits_for(self, rule: Rule, triggers: list[Trigger]) -> frozenset[type[Event]]:
        # Scheduled events that renew values which the rule reads.
        if not any(kind in BEFORE_BOUNDARY for trigger in triggers for kind in trigger.events):
            return frozenset()
        read = [self._metrics[name] for name in rule.names if name in self._metrics]
        return frozenset(kind for kind in (Log, ValidationEnd) if any(_renews(kind, metric, rule) for metric in read))

    def _handled_events(self, controllers: tuple[CheckedRule, ...]) -> frozenset[type[Event]]:
        handled = {kind for rule in controllers for trigger in rule.triggers for kind in trigger.events}
        if CheckpointSaved in handled:
            handled |= set(EndTracker.EVENTS)
        return frozenset(handled.union(*(metric.events for metric in self._metrics.values())))

    @contextmanager
    def _located(self, line: int | None, controller: str | None = None) -> Iterator[None]:
        try:
            yield
        except RuleError as error:
            raise error.located(file=self._rules.file, line=line, controller=controller) from error.__cause__


def _renews(kind: type[Event], metric: RuleMetric, rule: Rule) -> bool:
    parts = metric.parts.get(kind)
    return kind in metric.events and (parts is None or any(part in rule.text for part in parts))


def _needed_request(ready: CheckedRule) -> str | None:
    # None if some trigger occurs without a request.
    requests = {needed_request(trigger) for trigger in ready.triggers}
    return requests.pop() if len(requests) == 1 else None


def _requests(actions: Iterable[tuple[RuleOperation, str]], kinds: set[type[Event]]) -> Iterator[str]:
    for operation, action in actions:
        if action in operation.asks and not kinds <= set(operation.answers.get(action, ())):
            yield operation.asks[action]
