"""A rule file put together: its metrics and operations found and tried, its rules compiled, everything checked."""

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
from unicodedata import normalize

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
from heliograph.events import CATALOGUE, Event
from heliograph.spi import known_names

from ..base import Ending, RuleMetric, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleSyntaxError, RuleTypeError, show
from ..language.kinds import SIGNATURES
from ..language.rule import Rule, compile_rule
from ..operations.log_control import names_at
from ..operations.requests import Function
from ..registry import DEFAULT_OPERATIONS, metric_class, operation_class
from .config import Problems
from .specs import OnError, RulePart, RuleSet, RuleSpec
from .triggers import BEFORE_BOUNDARY, Trigger, need_of, trigger_named


@dataclass(frozen=True)
class Given:
    """What a `RuleController` is given besides its rules.

    Attributes:
        metrics: classes that the rules may name.
        operations: classes that they may name.
        functions: functions that they may name.
        on_error: what rules do that do not say so themselves.
    """

    metrics: tuple[type[RuleMetric], ...] = ()
    operations: tuple[type[RuleOperation], ...] = ()
    functions: Mapping[str, Function] = field(default_factory=dict)
    on_error: OnError = "warn"


@dataclass(frozen=True)
class Ready:
    """A controller that was checked.

    Attributes:
        spec: as it is in the file.
        file: the file.
        rule: its rule, compiled.
        triggers: its moments.
        actions: what it does, as (operation, action).
        level: the logging level at which it is logged that it acts.
        on_error: what a failure of it leads to.
        shared: whether all ranks must agree upon it.
        waits_for: what, where it is due at an epoch's end, has new values of what the rule reads.
        asks: what its actions ask the loop for.
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
        """Its name."""
        return self.spec.name

    @property
    def settings(self) -> str:
        """Everything that it acts by, as one line: where this differs, it is another rule."""
        spec, patience = self.spec, self.spec.patience
        patient = "" if patience is None else f" after {patience.threshold}, {patience.mode}"
        return (
            f"{', '.join(spec.triggers)}: {' '.join(self.rule.text.split())} -> {', '.join(spec.operations)}{patient}"
        )


@dataclass(frozen=True)
class Blueprint:
    """All rules of a file.

    Attributes:
        file: the file.
        metrics: makers, by the metrics' names: one is made for every run.
        operations: makers, by the operations' names.
        controllers: in the order of the file.
        events: what must be handled.
        asks: what the rules ask the loop for.
        needs: what some plugin must ask for, or a rule would never be asked; and the data that rules ask to validate.
        asks_ranks: whether several ranks agree on what is due; else this one's word counts.
    """

    file: str | None
    metrics: Mapping[str, Callable[[], RuleMetric]]
    operations: Mapping[str, Callable[[], RuleOperation]]
    controllers: tuple[Ready, ...]
    events: frozenset[type[Event]]
    asks: tuple[str, ...]
    needs: tuple[str, ...]
    asks_ranks: bool = True


T = TypeVar("T", RuleMetric, RuleOperation)


def instantiate(kind: type[T], name: str, arguments: Mapping[str, Any]) -> T:
    """Return a metric or an operation with its own copies of the arguments.

    Raises:
        RuleError: it cannot be made so; of the subclass that fits its own error, which is the cause.
    """
    _check_arguments(kind, name, arguments)
    try:
        return kind(name, **deepcopy(dict(arguments)))
    except RuleError:
        raise
    except Exception as error:
        fitting = {TypeError: RuleTypeError, KeyError: RuleKeyError}
        raised = next((each for base, each in fitting.items() if isinstance(error, base)), RuleError)
        raise raised(f"{kind.__name__} {name!r} cannot be made: {str(error).removesuffix('.')}.") from error


def _check_arguments(kind: type[RuleMetric] | type[RuleOperation], name: str, arguments: Mapping[str, Any]) -> None:
    """Raise RuleTypeError where a class does not take one of the arguments."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first is the name
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    allowed = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    for unknown in arguments:
        if unknown not in allowed:
            known = known_names(unknown, allowed)
            raise RuleTypeError(f"{kind.__name__} {name!r} cannot be made: it takes no argument {unknown!r}.{known}")


def bound(
    kind: type[RuleOperation], name: str, arguments: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> RuleOperation:
    """Return an operation that has found the functions which it calls.

    Raises:
        RuleError: it cannot be made so, or there is no such function.
    """
    operation = instantiate(kind, name, arguments)
    operation.bind(functions)
    return operation


def check_metric(metric: RuleMetric, name: str) -> None:
    """Check that a metric that was made can be used.

    Raises:
        RuleError: it says that it cannot be, it would never be computed, or its events are none.
    """
    try:
        is_valid = metric.validate()
    except ValueError as error:  # one that says why
        raise RuleError(f"Metric handler {name} failed validation: {error}") from error
    if not is_valid:
        raise RuleError(f"Metric handler {name} failed validation.")
    if getattr(metric.compute, "__func__", None) is RuleMetric.compute:
        raise RuleError(f"{type(metric).__name__} computes nothing: give it a method compute(self, run, event).")
    if not isinstance(metric.events, tuple) or not set(metric.events) <= set(CATALOGUE):
        kind, events = type(metric).__name__, show(metric.events)
        raise RuleError(f"The events of {kind} are a tuple of classes of heliograph.CATALOGUE, got {events}.")
    if not metric.events and not metric.when_read:
        raise RuleError(
            f"{type(metric).__name__} would never be computed: say at which events, as in events = (ValidationEnd,), "
            "or when_read = True."
        )


def check_actions(operation: RuleOperation) -> None:
    """Check that the actions of an operation can be called.

    Raises:
        RuleTypeError: one takes something else than `(run, firing)`, or is a coroutine or a generator.
    """
    for name, action in operation.actions().items():
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        try:
            inspect.signature(action).bind(None, None)
            is_action = not any(kind(action) for kind in kinds)
        except TypeError:
            is_action = False
        if not is_action:
            raise RuleTypeError(
                f"{type(operation).__name__}.{name}{inspect.signature(action)} is not an action: one takes "
                "(run, firing), after self, and is not a coroutine or generator."
            )


def class_of(part: RulePart, base: type[T]) -> type[T] | None:
    """Return the class of a part that is given one, None where it is a name.

    Raises:
        RuleTypeError: it is not a subclass of the base.
    """
    if isinstance(part.kind, str):
        return None
    if not issubclass(part.kind, base):
        raise RuleTypeError(f"The class of {part.name!r} is a subclass of {base.__name__}, got {part.kind!r}.")
    return part.kind


def check_name(name: str) -> None:
    """Check that rules can read a metric of this name.

    Raises:
        RuleError: they cannot.
    """
    is_word = name.isidentifier() and not keyword.iskeyword(name) and name == normalize("NFKC", name)
    if not is_word or name.startswith(("_", "func_")) or "__" in name:
        raise RuleError(
            f"Rules cannot read a metric named {name!r}: take letters, digits and single underscores, a letter first."
        )
    if name in SIGNATURES:
        raise RuleError(f"Rules cannot read a metric named {name!r}, which is a function of theirs: rename it.")


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
