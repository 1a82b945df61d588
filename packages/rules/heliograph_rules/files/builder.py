"""Builds checked rules from a rule set: creates metrics and operations once to test them, and compiles rules."""

from __future__ import annotations

import inspect
import keyword
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import heliograph as h
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import EndTracker, RuleMetric, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleTypeError
from ..language import FUNCTION_NAMES, Rule
from ..operations.log_control import names_at
from ..operations.requests import Function
from ..registry import DEFAULT_OPERATIONS, metric_class, operation_class
from .config import Problems
from .specs import OnError, RulePart, RuleSet, RuleSpec
from .triggers import BEFORE_BOUNDARY, Trigger, find_trigger, needed_request


@dataclass(frozen=True)
class CheckedRule:
    """A checked controller.

    Attributes:
        spec: the rule as written.
        file: the rule file.
        rule: the compiled rule.
        triggers: when the rule is evaluated.
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
        unrecorded: in a dry run, the data that metrics miss, by the names of the metrics; None in other runs.
    """

    file: str | None
    metrics: Mapping[str, Callable[[], RuleMetric]]
    operations: Mapping[str, Callable[[], RuleOperation]]
    controllers: tuple[CheckedRule, ...]
    events: frozenset[type[Event]]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    unrecorded: dict[str, str] | None = None


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
    h.PluginChanged, h.PluginFailed, h.PredictBatchEnd, h.PredictBatchStart, h.Replay, h.RunClosed, h.RunFailed,
    h.TestBatchEnd, h.TestBatchStart, h.ValidationBatchEnd, h.ValidationBatchStart,
)  # fmt: skip


class Builder:
    """Checks rules and builds their blueprint.

    Args:
        rules: the rules.
        problems: collects the errors; without it, the first one is raised.
        metrics, operations, functions, on_error: see `RuleController`.
    """

    def __init__(
        self,
        rules: RuleSet,
        problems: Problems | None = None,
        *,
        metrics: Iterable[type[RuleMetric]] = (),
        operations: Iterable[type[RuleOperation]] = (),
        functions: Mapping[str, Function] | None = None,
        on_error: OnError = "warn",
    ) -> None:
        self._rules, self._problems = rules, problems or Problems()
        self._metric_classes, self._operation_classes = tuple(metrics), tuple(operations)
        self._functions, self._on_error = functions or {}, on_error
        self._metrics: dict[str, RuleMetric] = {}
        self._operations: dict[str, RuleOperation] = {}
        self._metric_makers: dict[str, Callable[[], RuleMetric]] = {}
        self._operation_makers: dict[str, Callable[[], RuleOperation]] = {}

    def blueprint(self) -> Blueprint:
        rules, attempt = self._rules, self._problems.attempt
        named = {part.name for part in rules.operations}
        defaults = [RulePart(name, kind) for name, kind in DEFAULT_OPERATIONS.items() if name not in named]
        for part in rules.metrics:
            attempt(self._check_metric, part)
        for part in (*defaults, *rules.operations):
            attempt(self._check_operation, part)
        self._problems.broken |= {part.name for part in rules.metrics} - self._metrics.keys()
        self._problems.broken |= named - self._operations.keys()
        checked = [attempt(self._check_rule, spec) for spec in rules.controllers]
        controllers = tuple(rule for rule in checked if rule is not None)
        needs = {_needed_request(rule) for rule in controllers}
        needs |= {"validation data" for rule in controllers if "validation" in rule.asks}
        return Blueprint(
            file=rules.file,
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
            kind = metric_class(part.kind, self._metric_classes)
            make = partial(create, kind, part.name, part.arguments)
            metric = make()
            check_usable(metric, part.name)
        self._metrics[part.name], self._metric_makers[part.name] = metric, make

    def _check_operation(self, part: RulePart) -> None:
        with self._located(part.line):
            if "." in part.name:
                raise RuleError(f"The name of an operation must not contain a dot, got {part.name!r}.")
            kind = operation_class(part.kind, self._operation_classes)
            make = partial(create_bound, kind, part.name, part.arguments, self._functions)
            operation = make()
            check_actions(operation)
        self._operations[part.name], self._operation_makers[part.name] = operation, make

    def _check_rule(self, spec: RuleSpec) -> CheckedRule | None:
        triggers = tuple(self._trigger(spec, name) for name in spec.triggers)
        rule = self._compile(spec)
        owners = {name.partition(".")[0] for name in spec.operations}
        if self._problems.broken & (owners | rule.names):
            return None  # reported already
        actions = [self._action(spec, name, triggers) for name in spec.operations]
        return CheckedRule(
            spec=spec,
            file=self._rules.file,
            rule=rule,
            triggers=triggers,
            level=logging.getLevelNamesMapping()[spec.log_level.upper()],
            on_error=spec.on_error or self._on_error,
            shared=any(operation.shared for operation, _ in actions),
            waits_for=self._waits_for(rule, triggers),
            asks=tuple(_requests(actions, {kind for trigger in triggers for kind in trigger.events})),
        )

    def _trigger(self, spec: RuleSpec, name: str) -> Trigger:
        with self._located(spec.lines.get(name, spec.line), spec.name):
            return find_trigger(name, spec.name)

    def _compile(self, spec: RuleSpec) -> Rule:
        with self._located(spec.lines.get("rule", spec.line), spec.name):
            return Rule(str(spec.rule), self._metrics.keys() | self._problems.broken)

    def _action(self, spec: RuleSpec, name: str, triggers: Iterable[Trigger]) -> tuple[RuleOperation, str]:
        owner, _, action = name.partition(".")
        with self._located(spec.lines.get(name, spec.line), spec.name):
            actions = {f"{key}.{act}" for key, operation in self._operations.items() for act in operation.actions()}
            if name not in actions:
                raise RuleKeyError(f"Invalid operation {name} for control {spec.name}.{known_names(name, actions)}")
            operation = self._operations[owner]
            for trigger, kind in ((trigger, kind) for trigger in triggers for kind in trigger.events):
                operation.check(action, self._metrics.keys() | names_at(kind), trigger.name, kind)
                if operation.shared and kind in NOT_COLLECTIVE:
                    raise RuleError(
                        f"{name} acts on all ranks together, but the ranks do not emit {kind.__name__} at the same "
                        f"time (the trigger {trigger.name!r}): choose another trigger."
                    )
        return operation, action

    def _waits_for(self, rule: Rule, triggers: Iterable[Trigger]) -> frozenset[type[Event]]:
        # Scheduled events that renew values which the rule reads.
        if not any(kind in BEFORE_BOUNDARY for trigger in triggers for kind in trigger.events):
            return frozenset()
        read = [self._metrics[name] for name in rule.names if name in self._metrics]
        return frozenset(
            kind for kind in (h.Log, h.ValidationEnd) if any(_renews(kind, metric, rule) for metric in read)
        )

    def _handled_events(self, controllers: tuple[CheckedRule, ...]) -> frozenset[type[Event]]:
        handled = {kind for rule in controllers for trigger in rule.triggers for kind in trigger.events}
        if h.CheckpointSaved in handled:
            handled |= set(EndTracker.EVENTS)
        return frozenset(handled.union(*(metric.events for metric in self._metrics.values())))

    @contextmanager
    def _located(self, line: int | None, controller: str | None = None) -> Iterator[None]:
        try:
            yield
        except RuleError as error:
            error.located(file=self._rules.file, line=line, controller=controller)
            raise


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
