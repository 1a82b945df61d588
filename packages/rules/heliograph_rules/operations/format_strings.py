"""Format strings that can reach nothing but plain data, and that never fail while they are filled in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ..errors import RuleLimitError, RuleSyntaxError

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
