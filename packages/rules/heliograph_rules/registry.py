"""The metric and operation classes that rule files can name: built in, registered, or installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from heliograph.plugins import discover
from heliograph.spi import find, known_names

from .base import RuleMetric, RuleOperation
from .errors import RuleKeyError, RuleTypeError
from .metrics.ancestors import EvalMetrics, Loss, Metrics, PerProcessState, TrainingState
from .metrics.history import HistoryBasedMetric
from .metrics.measures import GradientNorm, LearningRate, Memory, Throughput
from .operations.log_control import LogControl
from .operations.requests import CallFunction, Controls, HFControls, ScaleLearningRate, ScaleLoss

T = TypeVar("T", bound=RuleMetric | RuleOperation)
M = TypeVar("M", bound=type[RuleMetric])
P = TypeVar("P", bound=type[RuleOperation])
METRIC_GROUP, OPERATION_GROUP = "heliograph.rule_metrics", "heliograph.rule_operations"
_METRICS: dict[str, type[RuleMetric]] = {
    kind.__name__: kind
    for kind in (
        EvalMetrics, GradientNorm, HistoryBasedMetric, LearningRate, Loss, Memory, Metrics, PerProcessState, Throughput,
        TrainingState,
    )
}  # fmt: skip
_OPERATIONS: dict[str, type[RuleOperation]] = {
    kind.__name__: kind for kind in (CallFunction, Controls, HFControls, LogControl, ScaleLearningRate, ScaleLoss)
}
DEFAULT_OPERATIONS: dict[str, type[RuleOperation]] = {"control": Controls, "hfcontrols": HFControls}


def register_metric(kind: M) -> M:
    """Register a metric class so that rule files can name it; usable as a decorator.

    Returns:
        The class.

    Raises:
        TypeError: the class is not a subclass of `RuleMetric`.
        ValueError: another class with this name is registered.
    """
    _add(_METRICS, kind, RuleMetric)
    return kind


def register_operation(kind: P) -> P:
    """Register an operation class so that rule files can name it; usable as a decorator.

    Returns:
        The class.

    Raises:
        TypeError: the class is not a subclass of `RuleOperation`.
        ValueError: another class with this name is registered.
    """
    _add(_OPERATIONS, kind, RuleOperation)
    return kind


def metric_class(kind: str | type, additions: Iterable[type[RuleMetric]] = ()) -> type[RuleMetric]:
    return _look_up(kind, _METRICS, additions, METRIC_GROUP, RuleMetric)


def operation_class(kind: str | type, additions: Iterable[type[RuleOperation]] = ()) -> type[RuleOperation]:
    return _look_up(kind, _OPERATIONS, additions, OPERATION_GROUP, RuleOperation)


def _look_up(
    kind: str | type, registered: dict[str, type[T]], additions: Iterable[type[T]], group: str, base: type[T]
) -> type[T]:
    if isinstance(kind, type):
        return _check(kind, base)
    classes = dict(registered)
    for addition in additions:
        _add(classes, addition, base)
    if kind in classes:
        return classes[kind]
    installed = {entry.name for entry in discover(group)}
    if kind.rpartition(":")[2] not in installed:
        part = "metric" if group == METRIC_GROUP else "operation"
        raise RuleKeyError(f"Undefined {part} handler {kind}.{known_names(kind, {*classes, *installed})}")
    try:
        entry = find(kind, group)
    except LookupError as error:
        raise RuleKeyError(str(error)) from None
    return _check(entry.load(), base)


def _add(classes: dict[str, type[T]], kind: type[T], base: type[T]) -> None:
    name = _check(kind, base).__name__
    if (registered := classes.setdefault(name, kind)) is not kind:
        raise ValueError(
            f"A class {name} is registered already, {registered.__module__}.{registered.__qualname__}: rename "
            f"{kind.__module__}.{kind.__qualname__}."
        )


def _check(kind: object, base: type[T]) -> type[T]:
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise RuleTypeError(f"The class must be a subclass of {base.__name__}, got {kind!r}.")
    return kind
