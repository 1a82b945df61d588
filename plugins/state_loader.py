"""The load of the states of plugins: at a resume and a roll-back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..events import Progress
from ..events.checks import describe_error
from .entry import PluginEntry
from .states import States


class StateLoader:
    """Loads the states of a trainer's plugins.

    Args:
        states: of the plugins.
    """

    def __init__(self, states: States) -> None:
        self._states = states

    def load(
        self, states: Mapping[str, Any], versions: Mapping[str, int], path: Path | None, *, goes_back: bool
    ) -> tuple[list[str], list[str]]:
        """Restore the state of every plugin; see `Plugins.load_state_dict`."""
        missing: list[str] = []
        mine = self._states.stateful()
        for entry in mine:
            state = states.get(entry.name)
            if state:
                self._load_state(entry, state, versions.get(entry.name, 1), path)
            elif self._has_state(entry):
                if goes_back and state is not None:
                    self._clear_state(entry, path)
                else:
                    missing.append(entry.name)
        names = {entry.name for entry in mine}
        return missing, [name for name, state in states.items() if state and name not in names]

    def load_filters(self, origin: Progress, states: Mapping[str, Any]) -> None:
        for entry in self._states.entries.values():
            with self._states.tolerating_errors(entry, "load_state_dict of a filter", "its filters begin here"):
                for key, when in entry.stateful_filters().items():
                    when.load_state_dict(origin, states.get(entry.name, {}).get(key, {}))

    def _has_state(self, entry: PluginEntry) -> bool:
        with self._states.tolerating_errors(entry, "state_dict", "whether it has a state is not known"):
            return bool(entry.plugin.state_dict())
        return True

    def _load_state(self, entry: PluginEntry, state: Any, version: int, path: Path | None) -> None:
        where = f"continue from its state in {path or 'the snapshot'}"
        with self._states.tolerating_errors(entry, "load_state_dict", "it continues without its state"):
            if version > (now := entry.state_version):
                raise ValueError(
                    f"Plugin {entry.name!r} cannot {where}: the state has version {version}, but the plugin reads "
                    f"versions up to {now}. Update the plugin's package. {_how_to_start_fresh(entry)}"
                )
            state = deepcopy(state)
            if version < now:
                remedy = f"It must accept a state of version {version}. {_how_to_start_fresh(entry)}"
                with _naming_plugin(entry, where, "migrate_state", remedy):
                    state = entry.plugin.migrate_state(state, version)
            with _naming_plugin(entry, where, "load_state_dict", f"{FORMAT_CHANGED} {_how_to_start_fresh(entry)}"):
                entry.plugin.load_state_dict(state)

    def _clear_state(self, entry: PluginEntry, path: Path | None) -> None:
        where = f"roll back to {path or 'a snapshot'}, in which its state is empty"
        with (
            self._states.tolerating_errors(entry, "load_state_dict({})", "its state did not change"),
            _naming_plugin(entry, where, "load_state_dict({})", "It must accept every result of its state_dict."),
        ):
            entry.plugin.load_state_dict({})


FORMAT_CHANGED = (
    "If the format has changed, use the plugin's previous version, or define state_version and migrate_state."
)


@contextmanager
def _naming_plugin(entry: PluginEntry, where: str, method: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        summary = f"Plugin {entry.name!r} cannot {where}: {method} raised {describe_error(error)}"
        raise ValueError(f"{summary}. {remedy}") from error


def _how_to_start_fresh(entry: PluginEntry) -> str:
    return f"To start it fresh, rename it: {type(entry.plugin).__name__}(...).named('{entry.name}_2')."
