"""The switches and the states of the replayed plugins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heliograph import Plugins, Progress

from ..format.records import AttemptRecord, EventEntry
from .run import ReplayRun

OffReason = Literal["unheld", "failed", "disabled", "absent"]
SWITCHED: dict[str, tuple[OffReason, bool]] = {
    "registered": ("absent", False),
    "unregistered": ("absent", True),
    "enabled": ("disabled", False),
    "disabled": ("disabled", True),
}


class Switches:
    """The reasons why a replayed plugin is switched off; it is on without a reason."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._off: dict[str, set[OffReason]] = {name: set() for name in plugins.names()}
        self._enabled_at_first = {name for name in plugins.names() if plugins.is_enabled(name)}

    def set(self, name: str, reason: OffReason, *, off: bool) -> None:
        before = bool(self._off[name])
        (self._off[name].add if off else self._off[name].discard)(reason)
        after = bool(self._off[name])
        if after and not before:
            self._plugins.disable(name)
        elif before and not after and name in self._enabled_at_first:
            self._plugins.enable(name)

    def begin(self, attempt: AttemptRecord, recorded: Collection[str]) -> None:
        """Begin an attempt: all are on, except plugins that were absent or disabled in the recorded attempt.

        Args:
            attempt: the attempt.
            recorded: the names of all plugins with handlers in any attempt.
        """
        present = {name for names in attempt.plan.values() for name in names}
        first_changes: dict[str, str] = {}
        for entry in attempt.entries:
            if isinstance(entry, EventEntry) and entry.event == "plugin_changed":
                first_changes.setdefault(entry.data["plugin"], entry.data["change"])
        for name in self._off:
            change = first_changes.get(name, "")
            is_absent = name in recorded and name not in present and not change
            self.set(name, "absent", off=is_absent or change == "registered")
            self.set(name, "disabled", off=change == "enabled")
            self.clear_errors(name)

    def clear_errors(self, name: str) -> None:
        self.set(name, "unheld", off=False)
        self.set(name, "failed", off=False)

    def apply(self, name: str, change: str) -> None:
        reason, off = SWITCHED[change]
        self.set(name, reason, off=off)

    def is_off(self, name: str, *reasons: OffReason) -> bool:
        return not self._off[name].isdisjoint(reasons)


@dataclass(slots=True)
class Snapshot:
    """The states at one save.

    Attributes:
        progress: the counters.
        plugins: the states of the plugins.
        filters: the states of their handlers' filters.
        control: the pending requests.
        metrics: the latest value of every metric.
        is_last_seen: whether an epoch of unknown length was at its last batch.
        broken: the plugins that had an error before, so that their states are invalid.
        path: the checkpoint, None until it is known.
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

    Attributes:
        best: the best checkpoint.
        unwritten: the snapshots whose checkpoint is not known yet.
    """

    def __init__(self, plugins: Plugins, switches: Switches) -> None:
        self._plugins, self._switches = plugins, switches
        self.best: Path | None = None
        self._snapshots: list[Snapshot] = []
        self.unwritten: list[Snapshot] = []

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
        self._snapshots.append(snapshot)
        self.unwritten.append(snapshot)

    def set_path(self, path: str, *, is_best: bool) -> None:
        """Set the checkpoint of the oldest snapshot without one."""
        if is_best:
            self.best = Path(path)
        if self.unwritten:
            self.unwritten.pop(0).path = path

    def find(self, path: str | None, origin: Mapping[str, int | float]) -> Snapshot | None:
        """Return the snapshot of a checkpoint, given its path and counters.

        The path may be unknown, because a kill came between the write and its event. A later save may have replaced a
        file. Therefore the counters with the clock have priority, then the path, then the counters alone.
        """

        def rank(snapshot: Snapshot) -> tuple[bool, bool, bool]:
            is_same = {**snapshot.progress, "earlier_seconds": 0} == {**origin, "earlier_seconds": 0}
            is_exact = is_same and snapshot.progress["earlier_seconds"] == origin.get("earlier_seconds")
            is_here = path is not None and snapshot.path == path
            return is_exact, is_here, is_same and not is_here

        best = max(reversed(self._snapshots), key=rank, default=None)
        return best if best is not None and any(rank(best)) else None

    def restore(self, snapshot: Snapshot, run: ReplayRun, *, rolls_back: bool) -> None:
        """Restore a snapshot in the plugins and in the run, which has its new origin already."""
        run.control.load_state_dict(snapshot.control, at_save_point=run.checkpoints.in_boundary)
        run.metrics.update(snapshot.metrics)
        run.is_last_seen = snapshot.is_last_seen
        for name in self._plugins.names():
            if name in snapshot.broken:
                self._switches.set(name, "unheld", off=True)
            elif rolls_back:
                self._switches.clear_errors(name)  # the error may be later than the snapshot
        self._plugins.load_state_dict(snapshot.plugins, goes_back=rolls_back)
        self._plugins.load_filter_states(run.origin, snapshot.filters)

    def reset_filters(self, origin: Progress) -> None:
        self._plugins.load_filter_states(origin, {})
