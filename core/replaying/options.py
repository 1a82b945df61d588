"""Plugins as they are written on the command line: `early_stopping:monitor=validation/loss,patience=2`."""

from __future__ import annotations

import ast
from typing import Any

from ...events.checks import known_names
from ...plugins.discovery import find
from ..filters import At, Between, Every, Once

FILTERS = {kind.__name__: kind for kind in (At, Between, Every, Once)}
OPEN, CLOSED, QUOTES = "([{", ")]}", "'\""


def made_plugin(text: str) -> Any:
    """Return an installed plugin, made with the options that a text gives.

    Args:
        text: `name`, or `name:key=value,key=value`. A value is a Python literal; a filter such as `Every(steps=5)`, of
            literals; or else a string as it is.

    Raises:
        LookupError: no installed plugin has this name.
        ImportError: it cannot be imported.
        ValueError: the text has another form, or an option is out of its range.
        TypeError: the plugin has no such option, or it is not of its kind.
    """
    name, options = parsed(text)
    loaded = find(name).load()
    try:
        return loaded(**options)
    except (TypeError, ValueError) as error:
        error.add_note(f"while making {text!r}")
        raise


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a text such as `log_schedule:when=Every(steps=5),at_end=True`.

    Raises:
        ValueError: it has another form.
    """
    head, equals, rest = text.partition("=")
    if not equals:
        return text, {}
    name, colon, first = head.rpartition(":")
    if not colon:
        raise ValueError(f"A plugin is written as name:key=value,key=value, got {text!r}.")
    options: dict[str, Any] = {}
    for part in _parts(f"{first}={rest}"):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ValueError(f"An option is written as key=value, got {part!r} in {text!r}.")
        if key.strip() in options:
            raise ValueError(f"The option {key.strip()} is given twice in {text!r}.")
        options[key.strip()] = _value(value.strip())
    return name, options


def _parts(text: str) -> list[str]:
    """Return what stands between the commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in QUOTES:
            quote = letter
        depth += (letter in OPEN) - (letter in CLOSED) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(text: str) -> Any:
    """Return what a text means."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return text
    if isinstance(node, ast.Call):
        return _filter(node, text)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return text


def _filter(call: ast.Call, text: str) -> Any:
    """Return the filter that a call makes; of what it is given, only literals are looked at."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in FILTERS:
        raise ValueError(f"{text!r} is no filter.{known_names(name, FILTERS)}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"A filter takes one counter by name, as in Every(steps=5); got {text!r}.")
    try:
        counters = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except ValueError:
        raise ValueError(f"A filter takes plain numbers, as in Every(steps=5); got {text!r}.") from None
    return FILTERS[name](**counters)
