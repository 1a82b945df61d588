"""The replayed plugins: which are switched on, and what a checkpoint held of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....events import Progress
from ....plugins import Plugins
from ..format.records import Attempt, Happened
from .run import ReplayRun

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


@dataclass(slots=True)
class Snapshot:
    """The states at one save.

    Attributes:
        progress: the counters.
        plugins: the states of the plugins.
        filters: those of their handlers' filters.
        control: what was due.
        metrics: the latest value of every metric.
        last_seen: whether an epoch of unknown length was at its last batch.
        broken: the plugins that could not go on before, whose state is worth nothing.
        path: where it was written, None while nobody has told.
    """

    progress: dict[str, int | float]
    plugins: dict[str, Any]
    filters: dict[str, Any]
    control: dict[str, Any]
    metrics: dict[str, float]
    last_seen: bool
    broken: set[str]
    path: str | None = None


class Snapshots:
    """Those of all saves so far.

    Args:
        plugins: the replayed ones.
        switches: which of them are on.

    Attributes:
        best: where the best state was written.
    """

    def __init__(self, plugins: Plugins, switches: Switches) -> None:
        self._plugins, self._switches = plugins, switches
        self.best: Path | None = None
        self._kept: list[Snapshot] = []
        self._untold: list[Snapshot] = []

    @property
    def wait(self) -> bool:
        """Whether there are some of which nobody has told where they were written."""
        return bool(self._untold)

    def take(self, run: ReplayRun) -> None:
        """Take one."""
        names = self._plugins.names()
        here = [name for name in names if not self._switches.is_off(name, "absent")]
        states, filters = self._plugins.state_dict(), self._plugins.filter_states(run.origin)
        snapshot = Snapshot(
            run.progress.state_dict(),
            {name: state for name, state in states.items() if name in here},
            {name: state for name, state in filters.items() if name in here},
            run.control.state_dict(),
            dict(run.metrics),
            run.last_seen,
            {name for name in names if self._switches.is_off(name, "unheld", "failed")},
        )
        self._kept.append(snapshot)
        self._untold.append(snapshot)

    def tell(self, path: str, *, is_best: bool) -> None:
        """Note where the oldest save that was not told of was written."""
        if is_best:
            self.best = Path(path)
        if self._untold:
            self._untold.pop(0).path = path

    def forget_untold(self) -> None:
        """Wait no longer for what was under way when an attempt ended."""
        self._untold.clear()

    def find(self, path: str | None, origin: Mapping[str, int | float]) -> Snapshot | None:
        """Return the snapshot that a checkpoint holds.

        A kill may have come between the write and its being told of, and a later save may have replaced a file: the
        counters with the clock decide, then the path, then the counters alone.

        Args:
            path: where the checkpoint lies.
            origin: its counters.
        """
        clock = {"earlier_seconds"}
        same = [each for each in self._kept if _without(each.progress, clock) == _without(origin, clock)]
        exact = [each for each in same if each.progress["earlier_seconds"] == origin.get("earlier_seconds")]
        told = [each for each in exact if path is not None and each.path == path]
        written = [each for each in self._kept if path is not None and each.path == path]
        ranked = told or exact or written or same
        return ranked[-1] if ranked else None

    def give_back(self, snapshot: Snapshot, run: ReplayRun, *, amid: bool) -> None:
        """Let run and plugins go on from a snapshot; the run has its new origin already.

        Args:
            snapshot: what to go on from.
            run: the run.
            amid: whether it goes back amid an attempt, to where a plugin may not have been broken yet.
        """
        run.control.load_state_dict(snapshot.control, at_save_point=run.in_boundary)
        run.metrics.update(snapshot.metrics)
        run.last_seen = snapshot.last_seen
        for name in self._plugins.names():
            if name in snapshot.broken:
                self._switches.set(name, "unheld", off=True)
            elif amid:
                self._switches.go_on(name)
        self._plugins.load_state_dict(snapshot.plugins, goes_back=amid)
        self._plugins.load_filter_states(run.origin, snapshot.filters)

    def begin_afresh(self, origin: Progress) -> None:
        """Let the filters begin where the run does, of which no snapshot is there."""
        self._plugins.load_filter_states(origin, {})


def _first_changes(entries: Iterable[object]) -> dict[str, str]:
    """Return what was first done to each plugin that was changed amid an attempt."""
    first: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Happened) and entry.event == "plugin_changed":
            first.setdefault(entry.data["plugin"], entry.data["change"])
    return first


def _without(counters: Mapping[str, int | float], names: set[str]) -> dict[str, int | float]:
    return {name: value for name, value in counters.items() if name not in names}
