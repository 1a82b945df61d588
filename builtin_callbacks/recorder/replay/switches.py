"""Which replayed plugins hear anything: the run had switched some off, and some could not go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from ....plugins import Plugins
from ..format.records import Attempt, EventEntry

Why = Literal["unheld", "failed", "disabled", "absent"]
SWITCHED: dict[str, tuple[Why, bool]] = {
    "registered": ("absent", False),
    "unregistered": ("absent", True),
    "enabled": ("disabled", False),
    "disabled": ("disabled", True),
}


class Switches:
    """Keeps the reasons for which each replayed plugin is off.

    Args:
        plugins: the replayed ones.
    """

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._off: dict[str, set[Why]] = {name: set() for name in plugins.names()}
        self._begin = {name for name in plugins.names() if plugins.is_enabled(name)}

    def set(self, name: str, why: Why, *, off: bool) -> None:
        """Add or take away a reason."""
        before = bool(self._off[name])
        (self._off[name].add if off else self._off[name].discard)(why)
        after = bool(self._off[name])
        if after and not before:
            self._plugins.disable(name)
        elif before and not after and name in self._begin:
            self._plugins.enable(name)

    def begin(self, attempt: Attempt, known: Collection[str]) -> None:
        """Begin an attempt: all are on, but those that its run had not, or not switched on.

        Args:
            attempt: which.
            known: the names of all plugins that heard something in any attempt.
        """
        heard = {name for names in attempt.plan.values() for name in names}
        first = _first_changes(attempt.entries)
        for name in self._off:
            change = first.get(name, "")
            away = name in known and name not in heard and not change
            self.set(name, "absent", off=away or change == "registered")
            self.set(name, "disabled", off=change == "enabled")
            self.go_on(name)

    def go_on(self, name: str) -> None:
        """Let a plugin hear again that could not go on."""
        self.set(name, "unheld", off=False)
        self.set(name, "failed", off=False)

    def follow(self, name: str, change: str) -> None:
        """Do to a replayed plugin what was done to the one in the run."""
        why, off = SWITCHED[change]
        self.set(name, why, off=off)

    def is_off(self, name: str, *reasons: Why) -> bool:
        """Return whether a plugin is off for one of these reasons; for any where none is given."""
        return bool(self._off[name] & set(reasons) if reasons else self._off[name])


def _first_changes(entries: Iterable[object]) -> dict[str, str]:
    """Return what was first done to each plugin that was changed amid an attempt."""
    first: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, EventEntry) and entry.event == "plugin_changed":
            first.setdefault(entry.data["plugin"], entry.data["change"])
    return first
