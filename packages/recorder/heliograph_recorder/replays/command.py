"""The command `replay`, for example `python -m heliograph replay RUN --plugin early_stopping:patience=2`."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from heliograph import Plugin
from heliograph.spi import check_options, find

NAME = "replay"
COMMAS = re.compile(r",(?![^(\[{]*[)\]}])")  # outside of brackets


def replay(arguments: Sequence[str]) -> int:
    """Show what plugins would have requested in a recorded run."""
    parser = argparse.ArgumentParser(
        prog=f"heliograph {NAME}",
        description="Exit status 0: replayed; 1: a replayed plugin failed; 2: the recording or a plugin is missing, or "
        "the options of a plugin are invalid.",
    )
    parser.add_argument("recording", metavar="RUN", help="the file that Recorder wrote, or its folder")
    parser.add_argument(
        "--plugin",
        action="append",
        required=True,
        dest="plugins",
        metavar="NAME:KEY=VALUE,...",
        help="an installed plugin and its options, for example early_stopping:monitor=validation/loss,patience=2 or "
        "log_schedule:steps=5; repeat it for several plugins, in order; the second plugin of the same name is called "
        "early_stopping_2",
    )
    options = parser.parse_args(arguments)
    from .replay import replay as replay_plugins  # after the parser: torch is slow to import

    try:
        plugins, names = make_plugins(options.plugins)
        replayed = replay_plugins(options.recording, plugins)
    except (LookupError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"heliograph {NAME}: {error}", file=sys.stderr)
        return 2
    print(replayed, *names, sep="\n")
    return 1 if replayed.failed else 0


def make_plugins(texts: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Return the plugins of several texts, and a line for each renamed plugin.

    The second plugin of the same name is called `early_stopping_2`, and so on, so that settings can be compared.
    """
    plugins: list[Any] = []
    lines: list[str] = []
    names: set[str] = set()
    for text in texts:
        plugin = make_plugin(text)
        if isinstance(plugin, Plugin):
            name, number = plugin.name, 1
            while plugin.name in names:
                number += 1
                plugin.named(f"{name}_{number}")
            names.add(plugin.name)
            lines += [f"{plugin.name} is {text!r}"] * (number > 1)
        plugins.append(plugin)
    return plugins, lines


def make_plugin(text: str) -> Any:
    """Return an installed plugin, given `name` or `name:key=value,key=value`.

    A value is a Python literal, or otherwise a string.
    """
    name, options = parse_plugin(text)
    loaded = find(name).load()
    check_options(name, loaded, options, lambda option: f"'{name}:{option}'")
    return loaded(**options)


def parse_plugin(text: str) -> tuple[str, dict[str, Any]]:
    head, equals, tail = text.partition("=")
    if not equals:
        return text, {}
    name, colon, first = head.rpartition(":")
    if not colon:
        raise ValueError(f"A plugin is written as name:key=value,key=value, got {text!r}.")
    options: dict[str, Any] = {}
    for part in COMMAS.split(f"{first}={tail}"):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier() or key in options:
            raise ValueError(f"An option is written once, as key=value; got {part!r} in {text!r}.")
        options[key] = _parse_value(value)
    return name, options


def _parse_value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
