"""Log a line when a rule fires."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from string import Formatter
from typing import Any

from heliograph import CheckpointSaved, Log, Run
from heliograph.events import Event
from heliograph.spi import known_names

from ..base import RuleFiring, RuleOperation
from ..errors import RuleError, RuleLimitError, RuleSyntaxError, RuleTypeError, show
from ..metrics.log_history import LOGGED, entry_of, under_both_names

WIDEST = 200  # of a format spec's width and precision
LONGEST = 10_000  # characters of one field
LONGEST_LINE = 100_000  # of all of them
FIELD = re.compile(r"([^\W\d]\w*)((?:\.\w+|\[[^\[\]]+\])*)")
KEY = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?(\d*)[,_]?(?:\.(\d+))?[a-zA-Z%]?", re.DOTALL)
CONVERSIONS: dict[str, Callable[[Any], str]] = {"a": ascii, "r": repr, "s": str}


@dataclass(frozen=True)
class Field:
    """One field of a format string.

    Attributes:
        text: as it is written.
        name: what it begins with.
        keys: where it goes from there.
        conversion: `r`, `s`, `a` or None.
        spec: how it is formatted.
    """

    text: str
    name: str
    keys: tuple[str, ...]
    conversion: str | None
    spec: str

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the field's value as text; what is not there, or does not fit, is said in its place."""
        value: Any = values
        for key in (self.name, *self.keys):
            try:
                value = _item(value, key)
            except (KeyError, IndexError):
                return f"<missing: {self.text}>"
        try:
            text = _format(value, self.conversion, self.spec)
        except (ValueError, TypeError, OverflowError) as error:
            return f"<{self.text} cannot be formatted: {error}>"
        return text if len(text) <= LONGEST else text[:LONGEST] + "..."


class Format:
    """A format string as `str.format` takes it, whose fields go by keys and indices only.

    `{state[epoch]:.0f}` and `{state.epoch:.0f}` are the same: a key of a dict, or an index of a list.

    Args:
        text: the format string.

    Attributes:
        names: what its fields begin with.

    Raises:
        RuleSyntaxError: it is none, or has a field without a name.
        RuleLimitError: a field is wider than 200 characters.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[str | Field] = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise RuleSyntaxError(
                f"The format {text!r} cannot be read: {error}. Write braces as {{{{ and }}}}."
            ) from None
        for literal, name, spec, conversion in parsed:
            self._parts.append(literal)
            if name is not None:
                self._parts.append(_field(text, name, spec or "", conversion))
        self.names = frozenset(part.name for part in self._parts if isinstance(part, Field))

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with the values, which are plain data, in it; cut where it is very long."""
        filled, left = list[str](), LONGEST_LINE
        for part in self._parts:
            text = part if isinstance(part, str) else part.fill(values)
            filled.append(text if len(text) <= left else text[:left] + "...")
            left -= len(text)
            if left < 0:
                break
        return "".join(filled)


def _field(text: str, name: str, spec: str, conversion: str | None) -> Field:
    """Return a checked field."""
    match, numbers = FIELD.fullmatch(name), SPEC.fullmatch(spec)
    if match is None:
        raise RuleSyntaxError(
            f"The format {text!r} has a field {{{name}}}: write a metric or field by name, as in {{state[epoch]}}."
        )
    if numbers is None or (conversion is not None and conversion not in CONVERSIONS):
        raise RuleSyntaxError(
            f"The format {text!r} has a field {{{name}}} that is formatted as {spec or conversion!r}."
        )
    if any(len(number) > 3 or int(number) > WIDEST for number in numbers.groups() if number):
        raise RuleLimitError(f"The format {text!r} has a field {{{name}:{spec}}} of more than {WIDEST} characters.")
    keys = tuple(dotted or bracketed for dotted, bracketed in KEY.findall(match[2]))
    return Field(name, match[1], keys, conversion, spec)


def _item(value: Any, key: str) -> Any:
    """Return what lies under a key of a dict or at an index of a list; nothing else is looked into."""
    if type(value) is dict and key in value:
        return value[key]
    try:
        index = int(key)
    except ValueError:
        raise KeyError(key) from None
    if type(value) in (dict, list, tuple):
        return value[index]
    raise KeyError(key)


def _format(value: Any, conversion: str | None, spec: str) -> str:
    return format(value if conversion is None else CONVERSIONS[conversion](value), spec)


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


logger = logging.getLogger("heliograph")


class LogControl(RuleOperation):
    """Log a line, made of metrics and of fields of the firing.

    Besides the metrics there are `event_name`, `control_name`, `args` (the hyper-parameters) and the event's fields,
    such as `path` where a checkpoint was saved. A key that is missing when it is logged is shown as missing.

    Args:
        name: what controllers call it.
        log_format: such as `Epoch {trainer_state[epoch]:.0f}: {training_loss[loss]:.3f}`.
        log_level: `debug`, `info`, `warning`, `error` or `critical`, in any case.

    Raises:
        RuleError: there is no such level, or the format cannot be read.
    """

    def __init__(self, name: str, log_format: str, log_level: str = "info") -> None:
        super().__init__(name)
        if not isinstance(log_format, str):
            raise RuleTypeError(
                f"log_format is a string such as '{{event_name}}: {{loss[loss]}}', got {show(log_format)}."
            )
        levels = {word.lower(): number for word, number in logging.getLevelNamesMapping().items() if number}
        if not isinstance(log_level, str) or log_level.lower() not in levels:
            got = show(log_level)
            raise RuleError(f"There is no log_level {got}.{known_names(got.lower(), levels)}")
        self._level, self._format = levels[log_level.lower()], Format(log_format)
        self.reads = self._format.names

    def should_log(self, run: Run, firing: RuleFiring) -> None:
        """Log the line."""
        if logger.isEnabledFor(self._level):
            logger.log(self._level, "%s", self._format.fill(values_of(run, firing, self.reads)))
