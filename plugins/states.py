"""The states of plugins and of the filters of their handlers: collected for a checkpoint, restored from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..events import Progress
from ..events.checks import PLAIN
from ..events.errors import describe_error
from .entry import PluginEntry

Check = Callable[[Any, str], object]  # of a state and its name: raises TypeError where it cannot be saved
Forgive = Callable[[PluginEntry, str, str, BaseException], bool]


class States:
    """The states of a trainer's plugins.

    Args:
        entries: the plugins by their names.
        forgive: given a plugin, what failed, what comes of it and the error, returns whether the run continues.
    """

    def __init__(self, entries: Mapping[str, PluginEntry], forgive: Forgive) -> None:
        self._entries, self._forgive = entries, forgive

    def save(self, check: Check | None = None) -> dict[str, Any]:
        """Return a copy of every plugin's state by name; an observer's that cannot be had or saved is left out."""
        states: dict[str, Any] = {}
        for entry in self._stateful():
            with self._spared(entry, "state_dict", "its state is not saved"):
                state = copied(entry.plugin.state_dict())
                if check is not None and entry.is_observer:
                    check(state, "its state")
                states[entry.name] = state
        return states

    def versions(self) -> dict[str, int]:
        """Return the versions of the states by name, but for those of version 1."""
        return {entry.name: version for entry in self._stateful() if (version := entry.state_version) != 1}

    def load(
        self, states: Mapping[str, Any], versions: Mapping[str, int], path: Path | None, *, goes_back: bool
    ) -> tuple[list[str], list[str]]:
        """Give every plugin its saved state. `Plugins.load_state_dict` says what the arguments are."""
        missing: list[str] = []
        mine = self._stateful()
        for entry in mine:
            state = states.get(entry.name)
            if state:
                self._give(entry, state, versions.get(entry.name, 1), path)
            elif self._has_something(entry):
                if goes_back and state is not None:
                    self._empty(entry, path)
                else:
                    missing.append(entry.name)
        names = {entry.name for entry in mine}
        return missing, [name for name, state in states.items() if state and name not in names]

    def save_filters(self, origin: Progress, check: Check | None = None) -> dict[str, Any]:
        """Return the state of every handler's filter, by the plugin's name and `<method>/<event>`."""
        states: dict[str, Any] = {}
        for entry in self._entries.values():
            with self._spared(entry, "state_dict of a filter", "the states of its filters are not saved"):
                if own := {key: when.state_dict(origin) for key, when in entry.stateful_filters().items()}:
                    if check is not None and entry.is_observer:
                        check(own, "the state of its filters")
                    states[entry.name] = own
        return states

    def load_filters(self, origin: Progress, states: Mapping[str, Any]) -> None:
        """Give every handler's filter its saved state; one without begins where the run began."""
        for entry in self._entries.values():
            with self._spared(entry, "load_state_dict of a filter", "its filters begin here"):
                for key, when in entry.stateful_filters().items():
                    when.load_state_dict(origin, states.get(entry.name, {}).get(key, {}))

    def _stateful(self) -> list[PluginEntry]:
        return [entry for entry in self._entries.values() if hasattr(entry.plugin, "state_dict")]

    @contextmanager
    def _spared(self, entry: PluginEntry, what: str, consequence: str) -> Iterator[None]:
        """Continue in spite of what an observer's state raises; name the plugin in what another's raises."""
        try:
            yield
        except BaseException as error:
            if not self._forgive(entry, what, consequence, error):
                error.add_note(f"heliograph: in {what} of plugin {entry.name!r}")
                raise

    def _has_something(self, entry: PluginEntry) -> bool:
        with self._spared(entry, "state_dict", "whether it has a state is not known"):
            return bool(entry.plugin.state_dict())
        return True

    def _give(self, entry: PluginEntry, state: Any, version: int, path: Path | None) -> None:
        """Restore a plugin from a state, migrated if needed."""
        where = f"continue from its state in {path or 'the snapshot'}"
        with self._spared(entry, "load_state_dict", "it continues without its state"):
            if version > (now := entry.state_version):
                raise ValueError(
                    f"Plugin {entry.name!r} cannot {where}: that is of version {version}, and the plugin reads up to "
                    f"{now}. Update the plugin's package. {_other_name(entry)}"
                )
            state = deepcopy(state)
            if version < now:
                mend = f"It has to take a state of version {version}. {_other_name(entry)}"
                with _explained(entry, where, "migrate_state", mend):
                    state = entry.plugin.migrate_state(state, version)
            with _explained(entry, where, "load_state_dict", f"{OTHER_FORM} {_other_name(entry)}"):
                entry.plugin.load_state_dict(state)

    def _empty(self, entry: PluginEntry, path: Path | None) -> None:
        """Return a plugin to where it had nothing to remember."""
        where = f"go back to {path or 'a snapshot'}, where it had an empty state"
        with (
            self._spared(entry, "load_state_dict({})", "it keeps what it has"),
            _explained(entry, where, "load_state_dict({})", "It has to take what its state_dict returned."),
        ):
            entry.plugin.load_state_dict({})


def copied(state: Any) -> Any:
    """Return a deep copy: most states are plain values in dicts and lists, each of which `deepcopy` asks ten things."""
    return _copied(state, {})


def _copied(state: Any, memo: dict[int, Any]) -> Any:
    kind = type(state)
    if kind in PLAIN:
        return state
    if kind is not dict and kind is not list:
        return deepcopy(state, memo)
    copy: Any = memo.get(id(state))
    if copy is None:
        copy = memo[id(state)] = kind()
        if kind is list:
            copy += [each if type(each) in PLAIN else _copied(each, memo) for each in state]
        else:
            for key, each in state.items():
                copy[_copied(key, memo)] = each if type(each) in PLAIN else _copied(each, memo)
    return copy


OTHER_FORM = (
    "If its state had another form then, use the version of the plugin that saved it, or give the plugin a "
    "state_version and a migrate_state."
)


@contextmanager
def _explained(entry: PluginEntry, where: str, method: str, mend: str) -> Iterator[None]:
    """Name the plugin and the file in what one of its methods raises."""
    try:
        yield
    except Exception as error:
        what = f"Plugin {entry.name!r} cannot {where}: {method} raised {describe_error(error)}"
        raise ValueError(f"{what}. {mend}") from error


def _other_name(entry: PluginEntry) -> str:
    return f"As {type(entry.plugin).__name__}(...).named('{entry.name}_2') it starts fresh."
