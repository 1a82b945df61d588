"""The operation that logs a line, with format strings that read only plain data and never fail."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from string import Formatter
from typing import Any

from heliograph import CheckpointSaved, Log, Run
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import RuleFiring, RuleOperation
from ..errors import RuleError, RuleSyntaxError, RuleTypeError, show
from ..metrics.history import LOGGED, entry_of, under_both_names

FIELD = re.compile(r"([^\W\d]\w*)((?:\.\w+|\[[^\[\]]+\])*)")
KEY = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


class LogFormat(Formatter):
    """A format string like that of `str.format`, whose fields contain only keys and indices.

    `{state[epoch]:.0f}` and `{state.epoch:.0f}` are equal: a key of a dict or an index of a list. `names` are the first
    names of the fields.
    """

    def __init__(self, text: str) -> None:
        try:
            fields = [(name, spec or "", conversion) for _, name, spec, conversion in self.parse(text)]
        except ValueError as error:
            raise RuleSyntaxError(f"The format {text!r} is invalid: {error}. Write braces as {{{{ and }}}}.") from None
        self.text, names = text, list[str]()
        for name, spec, conversion in fields:
            if name is None:
                continue
            match = FIELD.fullmatch(name)
            if match is None or "{" in spec or conversion not in (None, "a", "r", "s"):
                raise RuleSyntaxError(
                    f"The format {text!r} has an invalid field {{{name}}}: name a metric or field, such as "
                    f"{{state[epoch]:.1f}}."
                )
            names.append(match[1])
        self.names = frozenset(names)

    def fill(self, values: Mapping[str, Any]) -> str:
        return self.vformat(self.text, (), values)

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Read only keys and indices, never an attribute of an object."""
        match = FIELD.fullmatch(field_name)
        assert match is not None, "checked before"
        value: Any = kwargs
        for key in [match[1], *(dotted or bracketed for dotted, bracketed in KEY.findall(match[2]))]:
            try:
                value = value[key] if isinstance(value, Mapping) and key in value else value[int(key)]
            except (LookupError, TypeError, ValueError):
                return f"<missing: {field_name}>", match[1]
        return value, match[1]

    def format_field(self, value: Any, format_spec: str) -> str:
        """Write a value that does not fit the format as it is, for example None."""
        try:
            return str(super().format_field(value, format_spec))
        except (OverflowError, TypeError, ValueError):
            return str(value)


ALWAYS = ("args", "control_name", "event_name")


def names_at(kind: type[Event]) -> frozenset[str]:
    # Always event_name, control_name and args; the fields of the event; logs at Log; hf_path and is_final at
    # CheckpointSaved.
    names = {field.name for field in _fields(kind)} | set(ALWAYS)
    if issubclass(kind, Log):
        names.add("logs")
    if issubclass(kind, CheckpointSaved):
        names |= {"hf_path", "is_final"}
    return frozenset(names)


def fields_of(run: Run, firing: RuleFiring) -> dict[str, Any]:
    event = firing.event
    values: dict[str, Any] = {field.name: getattr(event, field.name) for field in _fields(event)}
    values |= {"args": dict(run.hyper_parameters), "control_name": firing.controller, "event_name": firing.trigger}
    if isinstance(event, LOGGED):
        values["metrics"] = under_both_names(event.metrics)
    if isinstance(event, Log):
        values["logs"] = entry_of(run, event)
    if isinstance(event, CheckpointSaved):
        values |= {"hf_path": event.path, "is_final": firing.is_final}
    return values


def _fields(event: Any) -> tuple[Any, ...]:
    return fields(event)  # the base class makes every event a dataclass


logger = logging.getLogger("heliograph")


class LogControl(RuleOperation):
    """Log a line with metrics and fields of the firing.

    In addition to the metrics, a format can use `event_name`, `control_name`, `args` (the hyper-parameters) and the
    fields of the event, for example `path` at a saved checkpoint. A missing key is logged as missing.

    Args:
        name: the name that controllers use.
        log_format: for example `Epoch {trainer_state[epoch]:.0f}: {training_loss[loss]:.3f}`.
        log_level: `debug`, `info`, `warning`, `error` or `critical`, in upper or lower case.

    Raises:
        RuleError: the level or the format is invalid.
    """

    def __init__(self, name: str, log_format: str, log_level: str = "info") -> None:
        super().__init__(name)
        if not isinstance(log_format, str):
            raise RuleTypeError(
                f"log_format must be a string, for example '{{event_name}}: {{loss[loss]}}', got {show(log_format)}."
            )
        levels = {word.lower(): number for word, number in logging.getLevelNamesMapping().items() if number}
        if not isinstance(log_level, str) or log_level.lower() not in levels:
            level = show(log_level)
            raise RuleError(f"Unknown log_level {level}.{known_names(level.lower(), levels)}")
        self._level, self._format = levels[log_level.lower()], LogFormat(log_format)
        self.reads = self._format.names

    def should_log(self, run: Run, firing: RuleFiring) -> None:
        if logger.isEnabledFor(self._level):
            # A metric hides a field of the same name.
            metrics = {name: firing.metrics[name] for name in self.reads if name in firing.metrics}
            logger.log(self._level, "%s", self._format.fill(fields_of(run, firing) | metrics))
