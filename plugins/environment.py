"""What the environment says of plugins: `HELIOGRAPH_PLUGINS=-progress,+handler_times` disables one and adds another."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection

from ..events.checks import known_names
from .first_party import DISTRIBUTIONS

VARIABLE = "HELIOGRAPH_PLUGINS"
OF_OTHERS = frozenset({"all", "1"})  # every plugin of another package, where it is loaded by name


def switched_off(name: str, package: str | None = None) -> bool:
    """Return whether the environment disables a plugin; `-all` disables every plugin of another package."""
    _, off = _words()
    return name in off or (bool(OF_OTHERS.intersection(off)) and package not in (None, *DISTRIBUTIONS))


def say_switched_off(name: str) -> None:
    """Warn that the variable disables a plugin, which may be forgotten."""
    warnings.warn(f"Plugin {name!r} is switched off by {VARIABLE}.", RuntimeWarning, stacklevel=3)


def say_stays_off(name: str) -> None:
    """Warn that a plugin cannot be enabled."""
    warnings.warn(f"{name!r} stays off, {VARIABLE} names it.", RuntimeWarning, stacklevel=3)


def not_loaded(names: Collection[str]) -> str:
    """Return the tail of an error sentence: which plugins are missing because the variable disables them."""
    return "".join(f" {name} was not loaded: {VARIABLE} disables it." for name in sorted(names))


def load_added(registered: Collection[str], load: Callable[[str], object]) -> None:
    """Load the plugins that the environment adds.

    Args:
        registered: the names of those that are there already: they are not added.
        load: loads one by its name.

    Raises:
        TypeError: a plugin that is added needs options.
        ValueError: the variable cannot be read.
    """
    for name in _words()[0]:
        if name.rpartition(":")[2] in registered:
            continue
        try:
            load(name)
        except Exception as error:
            error.add_note(f"heliograph: {VARIABLE} adds plugin {name!r}, with its default options")
            raise


def changes(registered: Collection[str], installed: Collection[str]) -> str:
    """Return what the environment has changed, in words.

    Args:
        registered: the names of the plugins of a trainer.
        installed: those of the installed ones.

    Raises:
        LookupError: it disables a plugin that is neither registered nor installed.
    """
    added, off = _words()
    unused = [name for name in off if name not in registered and name not in OF_OTHERS]
    for name in unused:
        if name not in installed:
            known = known_names(name, {*registered, *installed})
            raise LookupError(f"{VARIABLE} disables {name!r}, and no plugin has this name.{known}")
    parts = [f"adds {', '.join(added)}"] * bool(added) + [f"disables {', '.join(off)}"] * bool(off)
    there = f" (not in this program: {', '.join(unused)})" if unused else ""
    return f"{VARIABLE} {' and '.join(parts)}{there}"


def _words() -> tuple[list[str], list[str]]:
    """Return the plugins that the variable adds, and those that it disables.

    Raises:
        ValueError: a word begins with neither `+` nor `-`, or a plugin is both added and disabled.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    for word in words:
        if word[0] not in "+-" or not word[1:].strip():
            form = f"as in {VARIABLE}=-progress,+handler_times"
            raise ValueError(f"{VARIABLE} holds {word!r}: a + or a - comes before each name, {form}.")
    added, off = ([word[1:].strip() for word in words if word[0] == sign] for sign in "+-")
    for name in added:
        if name in off:
            raise ValueError(f"{VARIABLE} both adds and disables {name!r}.")
    return added, off
