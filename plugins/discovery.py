"""Plugins of installed packages, found through the entry-point group `heliograph.plugins`.

Finding reads metadata only; a plugin is imported when it is asked for. Installed is never enabled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..events.suggest import known_names
from .marks import marked_methods

GROUP = "heliograph.plugins"
KILL_SWITCH = "HELIOGRAPH_DISABLE_PLUGINS"
OURS = "heliograph"


@dataclass(frozen=True, slots=True)
class Discovered:
    """An entry point: a plugin that could be loaded."""

    name: str
    package: str
    version: str
    target: str
    switched_off: bool
    entry_point: EntryPoint = field(repr=False)

    def load(self) -> Callable[..., Any]:
        """Import the plugin class.

        Raises:
            ImportError: it cannot be imported; says which package is broken and why.
        """
        try:
            loaded = self.entry_point.load()
        except Exception as error:  # a broken third-party plugin harms nobody but who asks for it
            raise ImportError(
                f"Plugin {self.name!r} of package {self.package} {self.version} ({self.target}) cannot be imported: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not callable(loaded):
            raise ImportError(f"Plugin {self.name!r} of package {self.package} is no class or factory: {loaded!r}.")
        return loaded  # type: ignore[no-any-return]  # an entry point may be anything; callable was checked


def switched_off(name: str, package: str | None = None) -> bool:
    """Return whether the kill-switch names a plugin; `all` or `1` names every plugin that is not built in."""
    words = {word.strip() for word in os.environ.get(KILL_SWITCH, "").split(",")}
    return name in words or (bool(words & {"all", "1"}) and package not in (None, OURS))


def discover() -> list[Discovered]:
    """Return every installed plugin, sorted by name; nothing is imported."""
    found = []
    for point in entry_points(group=GROUP):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
        off = switched_off(point.name, package)
        found.append(Discovered(point.name, package, version, point.value, off, point))
    return sorted(found, key=lambda each: (each.name, each.package))


def find(name: str) -> Discovered:
    """Return the installed plugin of that name; `package:name` chooses where two packages use one.

    Raises:
        LookupError: none has this name, or several have.
    """
    package, _, short = name.rpartition(":")
    installed = discover()
    matches = {
        (each.package, each.target): each for each in installed if each.name == short and package in ("", each.package)
    }
    if not matches:
        raise LookupError(
            f"No installed plugin is named {name!r}.{known_names(short, [each.name for each in installed])}"
        )
    if len(matches) > 1:
        packages = ", ".join(f"{each.package}:{short}" for each in matches.values())
        raise LookupError(f"Several packages have a plugin {short!r}: say which, one of {packages}.")
    return next(iter(matches.values()))


def events_of(plugin_class: object) -> list[str]:
    """Return the names of the events that a plugin class subscribes to."""
    if not isinstance(plugin_class, type):
        return []
    blank: object = object.__new__(plugin_class)
    return sorted({event.name for _, mark in marked_methods(blank) for event in mark.events})
