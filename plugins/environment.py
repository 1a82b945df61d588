"""What the environment says of plugins: `HELIOGRAPH_PLUGINS=-progress,+handler_times` disables one and adds another."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection

from ..events.checks import known_names
from .first_party import DISTRIBUTIONS

VARIABLE = "HELIOGRAPH_PLUGINS"
OF_RUN = "HELIOGRAPH_RUN"  # what the command `run` was given, in the same form
CALLED = {VARIABLE: VARIABLE, OF_RUN: "`heliograph run`"}
OF_OTHERS = frozenset({"all", "1"})  # every plugin of another package, where it is loaded by name
logger = logging.getLogger("heliograph")


def switched_off(name: str, package: str | None = None) -> bool:
    """Return whether the environment disables a plugin; `-all` disables every plugin of another package."""
    _, off = _words()
    return name in off or (bool(OF_OTHERS.intersection(off)) and package not in (None, *DISTRIBUTIONS))


def say_switched_off(name: str) -> None:
    """Warn that the variable disables a plugin, which may be forgotten; who uses the command `run` has just said so."""
    if (variable := _variable_of(name)) == VARIABLE:
        warnings.warn(f"Plugin {name!r} is switched off by {VARIABLE}.", RuntimeWarning, stacklevel=3)
    else:
        logger.info("Plugin %r is switched off by %s.", name, CALLED[variable])


def say_stays_off(name: str) -> None:
    """Warn that a plugin cannot be enabled."""
    by = CALLED[_variable_of(name)]
    warnings.warn(f"{name!r} stays off, {by} names it.", RuntimeWarning, stacklevel=3)


def not_loaded(names: Collection[str]) -> str:
    """Return the tail of an error sentence: which plugins are missing because a variable disables them."""
    return "".join(f" {name} was not loaded: {CALLED[_variable_of(name)]} disables it." for name in sorted(names))


def load_added(registered: Collection[str], load: Callable[[str], object]) -> None:
    """Load the plugins that the environment adds.

    Args:
        registered: the names of those that are there already: they are not added.
        load: loads one by its name.

    Raises:
        TypeError: a plugin that is added needs options.
        ValueError: a variable cannot be read.
    """
    _words()
    for variable, called in CALLED.items():
        added, _ = _words_of(variable)
        for name in added:
            if name.rpartition(":")[2] in registered:
                continue
            try:
                load(name)
            except Exception as error:
                error.add_note(f"heliograph: {called} adds plugin {name!r}, with its default options")
                raise


def changes(registered: Collection[str], installed: Collection[str]) -> str:
    """Return what the environment has changed, in words.

    Args:
        registered: the names of the plugins of a trainer.
        installed: those of the installed ones.

    Raises:
        LookupError: it disables a plugin that is neither registered nor installed.
    """
    _words()
    said = [_changes_of(variable, registered, installed) for variable in CALLED if os.environ.get(variable)]
    return "; ".join(said)


def _changes_of(variable: str, registered: Collection[str], installed: Collection[str]) -> str:
    added, off = _words_of(variable)
    unused = [name for name in off if name not in registered and name not in OF_OTHERS]
    for name in unused:
        if name not in installed:
            known = known_names(name, {*registered, *installed})
            raise LookupError(f"{CALLED[variable]} disables {name!r}, and no plugin has this name.{known}")
    parts = [f"adds {', '.join(added)}"] * bool(added) + [f"disables {', '.join(off)}"] * bool(off)
    there = f" (not in this program: {', '.join(unused)})" if unused else ""
    return f"{CALLED[variable]} {' and '.join(parts)}{there}"


def _variable_of(name: str) -> str:
    """Return the variable that disables a plugin, if one does."""
    named = {name, *OF_OTHERS}
    return next((each for each in CALLED if not named.isdisjoint(_words_of(each)[1])), VARIABLE)


def _words() -> tuple[list[str], list[str]]:
    """Return the plugins that both variables add, and those that they disable.

    Raises:
        ValueError: a word begins with neither `+` nor `-`, or a plugin is both added and disabled.
    """
    (added, off), (more_added, more_off) = _words_of(VARIABLE), _words_of(OF_RUN)
    added, off = added + more_added, off + more_off
    for name in added:
        if name in off:
            raise ValueError(f"{VARIABLE}, or the command `run`, both adds and disables {name!r}.")
    return added, off


def _words_of(variable: str) -> tuple[list[str], list[str]]:
    words = [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]
    for word in words:
        if word[0] not in "+-" or not word[1:].strip():
            raise ValueError(f"{CALLED[variable]} holds {word!r}: a + or a - comes before each name, {_form()}.")
    added, off = ([word[1:].strip() for word in words if word[0] == sign] for sign in "+-")
    return added, off


def _form() -> str:
    return f"as in {VARIABLE}=-progress,+handler_times"
