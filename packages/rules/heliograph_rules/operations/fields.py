"""What can be logged of a firing by name, besides the metrics: fields of its event and rule, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from heliograph import CheckpointSaved, Log, Run
from heliograph.events import Event

from ..base import RuleFiring
from ..metrics.log_history import LOGGED, entry_of
from ..metrics.names import under_both_names

ALWAYS = ("args", "control_name", "event_name")


def names_at(kind: type[Event]) -> frozenset[str]:
    """Return the names of the fields that there are at an event.

    Always `event_name` (the trigger, as in the file), `control_name` (the controller) and `args` (the hyper-parameters,
    a dict); then the event's own, such as `metrics`, `epoch` and `path`; at `Log` also `logs`, what is logged under the
    ancestors' names; at `CheckpointSaved` also `hf_path` (the path) and `is_final`.
    """
    names = {field.name for field in _fields(kind)} | set(ALWAYS)
    if issubclass(kind, Log):
        names.add("logs")
    if issubclass(kind, CheckpointSaved):
        names |= {"hf_path", "is_final"}
    return frozenset(names)


def values_of(run: Run, firing: RuleFiring, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a firing and some of its metrics by name; a metric hides a field of the same name."""
    metrics = {name: firing.metrics[name] for name in names if name in firing.metrics}
    return fields_of(run, firing) | metrics


def fields_of(run: Run, firing: RuleFiring) -> dict[str, Any]:
    """Return the fields of a firing, those of `names_at`, as plain data."""
    event = firing.event
    values: dict[str, Any] = {field.name: getattr(event, field.name) for field in _fields(event)}
    values |= {"args": dict(run.hyper_parameters), "control_name": firing.controller, "event_name": firing.trigger}
    if isinstance(event, LOGGED):
        values["metrics"] = under_both_names(event.metrics)
    if isinstance(event, Log):
        values["logs"] = entry_of(run, event)
    if isinstance(event, CheckpointSaved):
        values |= {"hf_path": event.path, "is_final": firing.is_final}
    return {name: plain(value) for name, value in values.items()}


def plain(value: Any) -> Any:
    """Return a value as plain data: an exception as its type and text, any other object as its text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return str(value)


def _fields(event: Any) -> tuple[Any, ...]:
    return fields(event)  # every event is a dataclass, by its base
