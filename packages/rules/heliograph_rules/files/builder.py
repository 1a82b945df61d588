"""A rule file put together: its metrics and operations found and tried, its rules compiled, everything checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

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

from ..base import Ending, RuleMetric, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleSyntaxError
from ..language.rule import Rule, compile_rule
from ..operations.fields import names_at
from ..registry import DEFAULT_OPERATIONS, metric_class, operation_class
from .blueprint import Blueprint, Given, Ready
from .factories import bound, check_actions, check_metric, check_name, class_of, instantiate
from .problems import Problems
from .specs import RulePart, RuleSet, RuleSpec
from .triggers import BEFORE_BOUNDARY, Trigger, need_of, trigger_named

APART: tuple[type[Event], ...] = (  # ranks emit these at different times, or not all of them
    PluginChanged, PluginFailed, PredictBatchEnd, PredictBatchStart, Replay, RunClosed, RunFailed,
    TestBatchEnd, TestBatchStart, ValidationBatchEnd, ValidationBatchStart,
)  # fmt: skip


def build(rules: RuleSet, given: Given, problems: Problems | None = None) -> Blueprint:
    """Check rules, and put together what a run needs of them.

    Args:
        rules: as they are in the file.
        given: what else there is.
        problems: collects what is wrong with them; without it, the first error leaves.

    Raises:
        RuleError: something is wrong.
    """
    return _Building(rules, given, problems or Problems()).blueprint()


class _Building:
    """What was found and made so far."""

    def __init__(self, rules: RuleSet, given: Given, problems: Problems) -> None:
        self._rules, self._given, self._problems = rules, given, problems
        self._metrics: dict[str, RuleMetric] = {}
        self._operations: dict[str, RuleOperation] = {}
        self._metric_makers: dict[str, Callable[[], RuleMetric]] = {}
        self._operation_makers: dict[str, Callable[[], RuleOperation]] = {}
        self._metric_names = {part.name for part in rules.metrics} | self._problems.broken
        named = {part.name for part in rules.operations}
        defaults = [RulePart(name, kind) for name, kind in DEFAULT_OPERATIONS.items() if name not in named]
        self._parts = (*defaults, *rules.operations)

    def blueprint(self) -> Blueprint:
        """Return what a run needs."""
        attempt = self._problems.attempt
        for part in self._rules.metrics:
            attempt(self._try_metric, part)
        for part in self._parts:
            attempt(self._try_operation, part)
        ready = [attempt(self._ready, each) for each in self._rules.controllers]
        controllers = tuple(each for each in ready if each is not None)
        needed = {_need_of(each) for each in controllers}
        needed |= {"validation data" for each in controllers if "validation" in each.asks}
        return Blueprint(
            file=self._rules.file,
            metrics=self._metric_makers,
            operations=self._operation_makers,
            controllers=controllers,
            events=self._handle(controllers),
            asks=tuple(sorted({word for each in controllers for word in each.asks})),
            needs=tuple(sorted(word for word in needed if word)),
        )

    def _try_metric(self, part: RulePart) -> None:
        with self._placed(part.line):
            check_name(part.name)
            kind = class_of(part, RuleMetric) or metric_class(str(part.kind), self._given.metrics)
            make = partial(instantiate, kind, part.name, part.arguments)
            metric = make()
            check_metric(metric, part.name)
        self._metrics[part.name], self._metric_makers[part.name] = metric, make

    def _try_operation(self, part: RulePart) -> None:
        with self._placed(part.line):
            if "." in part.name:
                raise RuleError(f"The name of an operation has no dot, got {part.name!r}: actions are named after one.")
            kind = class_of(part, RuleOperation) or operation_class(str(part.kind), self._given.operations)
            make = partial(bound, kind, part.name, part.arguments, self._given.functions)
            operation = make()
            check_actions(operation)
        self._operations[part.name], self._operation_makers[part.name] = operation, make

    def _ready(self, spec: RuleSpec) -> Ready | None:
        attempt = self._problems.attempt
        triggers = [attempt(self._trigger, spec, name) for name in spec.triggers]
        known = [trigger for trigger in triggers if trigger is not None]
        actions = [attempt(self._action, spec, name, known) for name in spec.operations]
        rule = attempt(self._compile, spec)
        if rule is None or None in triggers or None in actions:
            return None
        done = [(self._operations[name], action) for name, action in filter(None, actions)]
        return Ready(
            spec=spec,
            file=self._rules.file,
            rule=rule,
            triggers=tuple(known),
            actions=tuple(action for action in actions if action is not None),
            level=logging.getLevelNamesMapping()[spec.log_level.upper()],
            on_error=spec.on_error or self._given.on_error,
            shared=any(operation.shared for operation, _ in done),
            waits_for=self._waits_for(rule, known),
            asks=tuple(_words(done, {kind for trigger in known for kind in trigger.events})),
        )

    def _trigger(self, spec: RuleSpec, name: str) -> Trigger:
        with self._placed(spec.lines.get(name, spec.line), spec.name):
            return trigger_named(name, spec.name)

    def _compile(self, spec: RuleSpec) -> Rule:
        with self._placed(spec.lines.get("rule", spec.line), spec.name):
            try:
                return compile_rule(str(spec.rule), self._metric_names)
            except RuleSyntaxError as error:
                problem = f"Rule for control {spec.name} is invalid: {error.problem}"
                raise RuleSyntaxError(problem, column=error.column) from error.__cause__

    def _action(self, spec: RuleSpec, name: str, triggers: list[Trigger]) -> tuple[str, str] | None:
        owner, _, action = name.partition(".")
        if owner not in self._operations and owner in {part.name for part in self._parts} | self._problems.broken:
            return None  # its own problem is added already
        with self._placed(spec.lines.get(name, spec.line), spec.name):
            actions = {f"{each}.{act}" for each, operation in self._operations.items() for act in operation.actions()}
            if name not in actions:
                tail = known_names(name, actions)
                raise RuleKeyError(f"Invalid operation {name} for control {spec.name}.{tail}")
            operation = self._operations[owner]
            for trigger, kind in ((each, kind) for each in triggers for kind in each.events):
                operation.check(action, self._metric_names | names_at(kind), trigger.name, kind)
                if operation.shared and kind in APART:
                    raise RuleError(
                        f"{name} is done by all ranks together, which do not all have {kind.__name__} at the "
                        f"same time (the trigger {trigger.name!r}): choose another trigger."
                    )
        return owner, action

    def _waits_for(self, rule: Rule, triggers: list[Trigger]) -> frozenset[type[Event]]:
        """Return what renews values that an epoch's end would show as they were before."""
        if not any(kind in BEFORE_BOUNDARY for trigger in triggers for kind in trigger.events):
            return frozenset()
        read = [self._metrics[name] for name in rule.names if name in self._metrics]
        return frozenset(kind for kind in (Log, ValidationEnd) if any(_renews(kind, each, rule) for each in read))

    def _handle(self, controllers: tuple[Ready, ...]) -> frozenset[type[Event]]:
        handled = {kind for each in controllers for trigger in each.triggers for kind in trigger.events}
        if CheckpointSaved in handled:
            handled |= set(Ending.EVENTS)
        return frozenset(handled.union(*(metric.events for metric in self._metrics.values())))

    @contextmanager
    def _placed(self, line: int | None, controller: str | None = None) -> Iterator[None]:
        """Add to an error where it is."""
        try:
            yield
        except RuleError as error:
            raise error.located(file=self._rules.file, line=line, controller=controller) from error.__cause__


def _renews(kind: type[Event], metric: RuleMetric, rule: Rule) -> bool:
    """Return whether an event has new values of what a rule reads of a metric."""
    parts = metric.parts.get(kind)
    return kind in metric.events and (parts is None or any(part in rule.text for part in parts))


def _need_of(ready: Ready) -> str | None:
    """Return what a rule would wait for in vain, None where some trigger of it comes of itself."""
    words = {need_of(trigger) for trigger in ready.triggers}
    return words.pop() if len(words) == 1 else None


def _words(actions: Iterable[tuple[RuleOperation, str]], kinds: set[type[Event]]) -> Iterator[str]:
    """Yield what actions ask the loop for at events of these kinds."""
    for operation, action in actions:
        if action in operation.asks and not kinds <= set(operation.answers.get(action, ())):
            yield operation.asks[action]
