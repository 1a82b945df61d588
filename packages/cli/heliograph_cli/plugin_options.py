"""Options of one plugin among several: `--trainer.plugins.early_stopping.patience=2`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heliograph.plugins import discover
from heliograph.spi import known_names

from .errors import ConfigurationError
from .names import PLUGINS, TRAINER, Load, path_of

OPTION = f"--{PLUGINS}"


@dataclass
class Entry:
    """One plugin of a configuration.

    Attributes:
        spec: its class path with its arguments.
        options: the words that set more of them.
    """

    spec: Any
    options: list[str] = field(default_factory=list)


def by_name(files: Iterable[Path], arguments: Sequence[str], load: Load) -> list[str]:
    """Return a command line in which each option of a plugin follows the plugin that it names, as jsonargparse has it.

    Args:
        files: those before the options, in their order.
        arguments: the options, written out.
        load: reads a text, and writes it out.

    Raises:
        ConfigurationError: an option names a plugin that is not there, or does not say of which one it is.
    """
    entries = [each for path in files for each in [_of_file(path, load)] if each is not None][-1:]
    plugins: list[Entry] = entries[0] if entries else []
    others, words, added, named = list[str](), iter(arguments), False, False
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--config":
            value = value if equals else next(words, "")
            plugins = _replaced(plugins, _of_file(Path(value), load))
            others.append(f"{option}={value}")
        elif option == f"--{TRAINER}":
            value = value if equals else next(words, "")
            plugins = _replaced(plugins, _plugins_of(load(value)))
            others.append(f"{option}={value}")
        elif option in (OPTION, f"{OPTION}+") and isinstance(specs := load(value), list):
            given = [*map(Entry, specs)]
            plugins = [*plugins, *given] if option.endswith("+") else _replaced(plugins, given)
            added = True
            others.append(word)
        elif option.startswith(f"{OPTION}.") and option != f"{OPTION}.help":
            value = value if equals else next(words, "")
            entry, key = _addressed(option.removeprefix(f"{OPTION}."), plugins, added=added)
            entry.options.append(f"{OPTION}.{key}={value}")
            named = True
        else:
            others.append(word)
    return [*others, *_in_order(plugins)] if named else others


def _replaced(plugins: list[Entry], others: list[Entry] | None) -> list[Entry]:
    """Return the others, if there are such, in the place of plugins that were given no options."""
    if others and (lost := [each for entry in plugins for each in entry.options]):
        raise ConfigurationError(f"{lost[0]} comes before what replaces the plugins: give it after that.")
    return others or plugins


def _in_order(plugins: Iterable[Entry]) -> list[str]:
    """Return the words that give every plugin, each followed by its options."""
    words, sign = list[str](), ""
    for entry in plugins:
        words += [f"{OPTION}{sign}={json.dumps([entry.spec])}", *entry.options]
        sign = "+"
    return words


def _of_file(path: Path, load: Load) -> list[Entry] | None:
    """Return the plugins of a file; None if it gives none."""
    config = load(path.read_text(encoding="utf-8"))
    return _plugins_of(config.get(TRAINER))


def _plugins_of(trainer: Any) -> list[Entry] | None:
    """Return the plugins of what is given as `trainer`; None if it gives none."""
    specs = trainer.get("plugins") if isinstance(trainer, dict) else None
    return [Entry(each) for each in specs] if isinstance(specs, list) else None


def _addressed(words: str, plugins: Sequence[Entry], *, added: bool) -> tuple[Entry, str]:
    """Return the plugin that an option is of, and the option without the name; a plugin just added needs no name."""
    parts = words.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        for entry in reversed(plugins):
            if isinstance(entry.spec, dict) and entry.spec.get("class_path") == _path_or_none(name):
                return entry, ".".join(parts[count:])
    if added and plugins:
        return plugins[-1], words
    called = {each.target.replace(":", "."): each.name for each in discover()}
    paths = [each.spec["class_path"] for each in plugins if isinstance(each.spec, dict)]
    there = known_names(parts[0], {called.get(path, path) for path in paths})
    raise ConfigurationError(
        f"{OPTION}.{words} does not name one of the plugins of this configuration: write "
        f"{OPTION}.NAME.OPTION=VALUE, or add a plugin before with {OPTION}+=NAME.{there}"
    )


def _path_or_none(name: str) -> str | None:
    try:
        return path_of(name)
    except LookupError:
        return None
