"""Metrics and operations, made from what a rule file says of them."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeVar
from unicodedata import normalize

from heliograph.events import CATALOGUE
from heliograph.spi import known_names

from ..base import RuleMetric, RuleOperation
from ..errors import RuleError, RuleKeyError, RuleTypeError
from ..language.kinds import SIGNATURES
from ..text import show
from .specs import RulePart

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
        raise RuleError(f"The events of {kind} are a tuple of classes of heliograph.events.CATALOGUE, got {events}.")
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
