"""Which metrics and operations rule files can name: built in, registered, given to a controller, or installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from heliograph.plugins import discover
from heliograph.spi import find, known_names

from .base import RuleMetric, RuleOperation
from .errors import RuleKeyError
from .metrics.ancestors import EvalMetrics, Loss, Metrics, PerProcessState, TrainingState
from .metrics.history import HistoryBasedMetric
from .metrics.measures import GradientNorm, LearningRate, Memory, Throughput
from .operations.log_control import LogControl
from .operations.requests import CallFunction, Controls, HFControls
from .operations.scale import ScaleLearningRate, ScaleLoss

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
    """Let rule files name a metric by its class name; return the class, so that this can be a decorator.

    Raises:
        TypeError: it is not a subclass of `RuleMetric`.
        ValueError: another one has this name.
    """
    _add(_METRICS, kind, RuleMetric)
    return kind


def register_operation(kind: P) -> P:
    """Let rule files name an operation by its class name; return the class, so that this can be a decorator.

    Raises:
        TypeError: it is not a subclass of `RuleOperation`.
        ValueError: another one has this name.
    """
    _add(_OPERATIONS, kind, RuleOperation)
    return kind


def metric_class(name: str, given: Iterable[type[RuleMetric]] = ()) -> type[RuleMetric]:
    """Return the metric class of a name.

    Args:
        name: the class name; of an installed package also `package:Name`.
        given: classes known to this controller only.

    Raises:
        RuleKeyError: there is none, or several packages have one.
        ImportError: the package that has it cannot be imported.
        TypeError: what is given or installed is not a subclass of `RuleMetric`.
        ValueError: another class of a given name is known.
    """
    return _look_up(name, _with(_METRICS, given, RuleMetric), METRIC_GROUP, RuleMetric)


def operation_class(name: str, given: Iterable[type[RuleOperation]] = ()) -> type[RuleOperation]:
    """Return the operation class of a name; see `metric_class`."""
    return _look_up(name, _with(_OPERATIONS, given, RuleOperation), OPERATION_GROUP, RuleOperation)


def _look_up(name: str, known: dict[str, type[T]], group: str, base: type[T]) -> type[T]:
    if name in known:
        return known[name]
    installed = {each.name for each in discover(group)}
    if name.rpartition(":")[2] not in installed:
        what = "metric" if group == METRIC_GROUP else "operation"
        raise RuleKeyError(f"Undefined {what} handler {name}.{known_names(name, {*known, *installed})}")
    try:
        found = find(name, group)
    except LookupError as error:
        raise RuleKeyError(str(error)) from None
    return _check(found.load(), base)


def _with(known: dict[str, type[T]], given: Iterable[type[T]], base: type[T]) -> dict[str, type[T]]:
    own = dict(known)
    for kind in given:
        _add(own, kind, base)
    return own


def _add(known: dict[str, type[T]], kind: type[T], base: type[T]) -> None:
    name = _check(kind, base).__name__
    if (other := known.setdefault(name, kind)) is not kind:
        raise ValueError(
            f"Another class {name} is known to rule files already, {other.__module__}.{other.__qualname__}: give "
            f"{kind.__module__}.{kind.__qualname__} a name of its own."
        )


def _check(kind: object, base: type[T]) -> type[T]:
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise TypeError(f"A class that rule files can name is a subclass of {base.__name__}, got {kind!r}.")
    return kind
