"""The replayed plugins: which are switched on, and their states at each save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heliograph import Plugins, Progress

from ..format.records import AttemptRecord, EventEntry
from .run import ReplayRun

Why = Literal["unheld", "failed", "disabled", "absent"]
SWITCHED: dict[str, tuple[Why, bool]] = {
    "registered": ("absent", False),
    "unregistered": ("absent", True),
    "enabled": ("disabled", False),
    "disabled": ("disabled", True),
}


class Switches:
    """The reasons for which each replayed plugin is switched off.

    Args:
        plugins: the replayed ones.
    """

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._off: dict[str, set[Why]] = {name: set() for name in plugins.names()}
        self._enabled_at_first = {name for name in plugins.names() if plugins.is_enabled(name)}

    def set(self, name: str, why: Why, *, off: bool) -> None:
        before = bool(self._off[name])
        (self._off[name].add if off else self._off[name].discard)(why)
        after = bool(self._off[name])
        if after and not before:
            self._plugins.disable(name)
        elif before and not after and name in self._enabled_at_first:
            self._plugins.enable(name)

    def begin(self, attempt: AttemptRecord, known: Collection[str]) -> None:
        present = {name for names in attempt.plan.values() for name in names}
        first = _first_changes(attempt.entries)
        for name in self._off:
            change = first.get(name, "")
            is_absent = name in known and name not in present and not change
            self.set(name, "absent", off=is_absent or change == "registered")
            self.set(name, "disabled", off=change == "enabled")
            self.forgive(name)

    def forgive(self, name: str) -> None:
        self.set(name, "unheld", off=False)
        self.set(name, "failed", off=False)

    def apply(self, name: str, change: str) -> None:
        why, off = SWITCHED[change]
        self.set(name, why, off=off)

    def is_off(self, name: str, *reasons: Why) -> bool:
        return bool(self._off[name] & set(reasons) if reasons else self._off[name])


@dataclass(slots=True)
class Snapshot:
    """The states at one save.

    Attributes:
        progress: the counters.
        plugins: the states of the plugins.
        filters: those of their handlers' filters.
        control: the requests that were due.
        metrics: the latest value of every metric.
        is_last_seen: whether an epoch of unknown length was at its last batch.
        broken: the plugins that had an error before, so that their states are useless.
        path: where it was written, None until that is known.
    """

    progress: dict[str, int | float]
    plugins: dict[str, Any]
    filters: dict[str, Any]
    control: dict[str, Any]
    metrics: dict[str, float]
    is_last_seen: bool
    broken: set[str]
    path: str | None = None


class Snapshots:
    """The snapshots of all saves so far.

    Args:
        plugins: the replayed ones.
        switches: which of them are on.

    Attributes:
        best: the file of the best state.
    """

    def __init__(self, plugins: Plugins, switches: Switches) -> None:
        self._plugins, self._switches = plugins, switches
        self.best: Path | None = None
        self._kept: list[Snapshot] = []
        self._unwritten: list[Snapshot] = []

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def take(self, run: ReplayRun) -> None:
        names = self._plugins.names()
        present = [name for name in names if not self._switches.is_off(name, "absent")]
        states, filters = self._plugins.state_dict(), self._plugins.filter_states(run.origin)
        snapshot = Snapshot(
            run.progress.state_dict(),
            {name: state for name, state in states.items() if name in present},
            {name: state for name, state in filters.items() if name in present},
            run.control.state_dict(),
            dict(run.metrics),
            run.is_last_seen,
            {name for name in names if self._switches.is_off(name, "unheld", "failed")},
        )
        self._kept.append(snapshot)
        self._unwritten.append(snapshot)

    def set_path(self, path: str, *, is_best: bool) -> None:
        if is_best:
            self.best = Path(path)
        if self._unwritten:
            self._unwritten.pop(0).path = path

    def forget_unwritten(self) -> None:
        self._unwritten.clear()

    def find(self, path: str | None, origin: Mapping[str, int | float]) -> Snapshot | None:
        clock = {"earlier_seconds"}
        same = [each for each in self._kept if _without(each.progress, clock) == _without(origin, clock)]
        exact = [each for each in same if each.progress["earlier_seconds"] == origin.get("earlier_seconds")]
        exact_here = [each for each in exact if path is not None and each.path == path]
        here = [each for each in self._kept if path is not None and each.path == path]
        ranked = exact_here or exact or here or same
        return ranked[-1] if ranked else None

    def restore(self, snapshot: Snapshot, run: ReplayRun, *, rolls_back: bool) -> None:
        run.control.load_state_dict(snapshot.control, at_save_point=run.checkpoints.in_boundary)
        run.metrics.update(snapshot.metrics)
        run.is_last_seen = snapshot.is_last_seen
        for name in self._plugins.names():
            if name in snapshot.broken:
                self._switches.set(name, "unheld", off=True)
            elif rolls_back:
                self._switches.forgive(name)
        self._plugins.load_state_dict(snapshot.plugins, goes_back=rolls_back)
        self._plugins.load_filter_states(run.origin, snapshot.filters)

    def reset_filters(self, origin: Progress) -> None:
        self._plugins.load_filter_states(origin, {})


def _first_changes(entries: Iterable[object]) -> dict[str, str]:
    first: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, EventEntry) and entry.event == "plugin_changed":
            first.setdefault(entry.data["plugin"], entry.data["change"])
    return first


def _without(counters: Mapping[str, int | float], names: set[str]) -> dict[str, int | float]:
    return {name: value for name, value in counters.items() if name not in names}
