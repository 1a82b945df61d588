"""The operation that logs a line, with format strings that read only plain data and never fail."""

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

WIDEST = 200  # width and precision of a format spec
LONGEST = 10_000  # characters of one field
LONGEST_LINE = 100_000  # characters of all fields
FIELD = re.compile(r"([^\W\d]\w*)((?:\.\w+|\[[^\[\]]+\])*)")
KEY = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?z?#?(\d*)[,_]?(?:\.(\d+))?[a-zA-Z%]?", re.DOTALL)
CONVERSIONS: dict[str, Callable[[Any], str]] = {"a": ascii, "r": repr, "s": str}


@dataclass(frozen=True)
class FormatField:
    """A field of a format string: `text` is its source, `keys` the path below `name`."""

    text: str
    name: str
    keys: tuple[str, ...]
    conversion: str | None
    spec: str

    def fill(self, values: Mapping[str, Any]) -> str:
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


class FormatString:
    """A format string like that of `str.format`, whose fields contain only keys and indices.

    `{state[epoch]:.0f}` and `{state.epoch:.0f}` are equal: a key of a dict or an index of a list. `names` are the first
    names of the fields.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[str | FormatField] = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise RuleSyntaxError(f"The format {text!r} is invalid: {error}. Write braces as {{{{ and }}}}.") from None
        for literal, name, spec, conversion in parsed:
            self._parts.append(literal)
            if name is not None:
                self._parts.append(_field(text, name, spec or "", conversion))
        self.names = frozenset(part.name for part in self._parts if isinstance(part, FormatField))

    def fill(self, values: Mapping[str, Any]) -> str:
        texts, remaining = list[str](), LONGEST_LINE
        for part in self._parts:
            text = part if isinstance(part, str) else part.fill(values)
            texts.append(text if len(text) <= remaining else text[:remaining] + "...")
            remaining -= len(text)
            if remaining < 0:
                break
        return "".join(texts)


def _field(text: str, name: str, spec: str, conversion: str | None) -> FormatField:
    match, numbers = FIELD.fullmatch(name), SPEC.fullmatch(spec)
    if match is None:
        raise RuleSyntaxError(
            f"The format {text!r} has an invalid field {{{name}}}: name a metric or field, such as {{state[epoch]}}."
        )
    if numbers is None or (conversion is not None and conversion not in CONVERSIONS):
        raise RuleSyntaxError(
            f"The format {text!r} has a field {{{name}}} with the invalid format {spec or conversion!r}."
        )
    if any(len(number) > 3 or int(number) > WIDEST for number in numbers.groups() if number):
        raise RuleLimitError(
            f"The format {text!r} has a field {{{name}:{spec}}} that is wider than {WIDEST} characters."
        )
    keys = tuple(dotted or bracketed for dotted, bracketed in KEY.findall(match[2]))
    return FormatField(name, match[1], keys, conversion, spec)


def _item(value: Any, key: str) -> Any:
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
    # Always event_name, control_name and args; the fields of the event; logs at Log; hf_path and is_final at
    # CheckpointSaved.
    names = {field.name for field in _fields(kind)} | set(ALWAYS)
    if issubclass(kind, Log):
        names.add("logs")
    if issubclass(kind, CheckpointSaved):
        names |= {"hf_path", "is_final"}
    return frozenset(names)


def values_of(run: Run, firing: RuleFiring, names: Iterable[str]) -> dict[str, Any]:
    # A metric hides a field of the same name.
    metrics = {name: firing.metrics[name] for name in names if name in firing.metrics}
    return fields_of(run, firing) | metrics


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
    return {name: plain(value) for name, value in values.items()}


def plain(value: Any) -> Any:
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
        self._level, self._format = levels[log_level.lower()], FormatString(log_format)
        self.reads = self._format.names

    def should_log(self, run: Run, firing: RuleFiring) -> None:
        if logger.isEnabledFor(self._level):
            logger.log(self._level, "%s", self._format.fill(values_of(run, firing, self.reads)))
