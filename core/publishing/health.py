"""The health of plugins of other packages: what their metadata say, and, where it is asked for, their import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from ...plugins.discovery import Discovered
from ...plugins.first_party import DISTRIBUTIONS
from ...plugins.installed import State, states_of
from ..system.extras import version


def health_of(found: Sequence[Discovered], *, check: bool) -> list[State]:
    """Return what is known of each plugin; those of other packages are imported only to be checked.

    Args:
        found: all installed plugins.
        check: whether to import those of other packages, each in a process of its own.
    """
    states = [_from_metadata(each) for each in found]
    imported = [
        each.package in DISTRIBUTIONS or (check and state.word == "not imported")
        for each, state in zip(found, states, strict=True)
    ]
    fresh = iter(states_of([each for each, is_imported in zip(found, imported, strict=True) if is_imported]))
    states = [next(fresh) if is_imported else state for state, is_imported in zip(states, imported, strict=True)]
    count = Counter(each.name for each in found)
    return [
        _with_twin(each, state) if each.package not in DISTRIBUTIONS and count[each.name] > 1 else state
        for each, state in zip(found, states, strict=True)
    ]


def _from_metadata(plugin: Discovered) -> State:
    if plugin.switched_off:
        return State("switched off", "not imported: HELIOGRAPH_PLUGINS names it")
    if text := _misfit(plugin, version()):
        return State("broken", text)
    distribution = plugin.entry_point.dist
    metadata = None if distribution is None else distribution.metadata
    return State("not imported", metadata["Summary"] if metadata is not None and "Summary" in metadata else "")


def _misfit(plugin: Discovered, present: str) -> str:
    """Return which heliograph the package needs, where it is not this one; empty where this one will do."""
    distribution = plugin.entry_point.dist
    for text in (distribution.requires if distribution is not None else None) or ():
        try:
            needed, own = Requirement(text), Version(present)
        except (InvalidRequirement, InvalidVersion):  # it says nothing that could be compared
            continue
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if needed.name.lower() == "heliograph" and applies and not needed.specifier.contains(own, prereleases=True):
            return f"it needs heliograph{needed.specifier}, and this is {present}"
    return ""


def _with_twin(plugin: Discovered, state: State) -> State:
    twin = f"another package has this name, too: load it as {plugin.package}:{plugin.name}"
    return replace(state, what=f"{state.what} ({twin})" if state.what else twin)
