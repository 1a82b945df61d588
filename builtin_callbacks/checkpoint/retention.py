"""Which checkpoints of a training are kept: the newest, the best, and those that somebody pinned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ...core.checkpoint.storage import Entry
from ...core.checkpoint.storage.manifest import best_first
from ...core.metrics.monitor import Monitor


class Retention:
    """A training's checkpoints in the order of writing, and which of them may go.

    Those that were written when trainings had no identity yet may be of several: they compete, but never go.

    Args:
        keep_last: how many of the newest stay; None is all.
        keep_best: how many of the best stay besides.
        monitor: the metric that makes the best; a checkpoint that was judged by another one does not compete.
    """

    def __init__(self, keep_last: int | None, keep_best: int, monitor: Monitor | None) -> None:
        self.keep_last, self.keep_best, self._monitor = keep_last, keep_best, monitor
        self._ranking: list[Entry] | None = None
        self.begin(())

    def begin(self, entries: Iterable[Entry], damaged: Collection[Path] = ()) -> None:
        """Begin with what there is of a training.

        Args:
            entries: its checkpoints.
            damaged: where some lie that cannot be read; they count for nothing, and go when others go.
        """
        self._entries = {each.path: each for each in sorted(entries, key=lambda entry: entry.sequence)}
        self._damaged, self._ranking = set(damaged), None

    def add(self, entry: Entry) -> None:
        """Enter a new checkpoint; it takes the place of one with the same path."""
        self._entries.pop(entry.path, None)
        self._entries[entry.path], self._ranking = entry, None
        self._damaged.discard(entry.path)

    def entry(self, path: Path) -> Entry | None:
        """Return the checkpoint that lies there, None where it is damaged or not known."""
        return None if path in self._damaged else self._entries.get(path)

    @property
    def best(self) -> Entry | None:
        """The best: of equals the earlier; NaN is the worst."""
        return next(iter(self._ranked_entries()), None)

    @property
    def rule(self) -> str:
        """Why a checkpoint is no longer kept, in words."""
        best = (
            "" if self._monitor is None else f", and not among the keep_best={self.keep_best} by {self._monitor.name}"
        )
        return f"keep_last={self.keep_last}{best}"

    def drop(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        """Forget the checkpoints that are no longer kept and return where they lie, the oldest first.

        Args:
            is_pinned: whether a checkpoint stays whatever happens; such ones do not count among the newest.
        """
        if self.keep_last is None:
            return []
        best = {entry.path for entry in self._ranked_entries()[: self.keep_best]}
        room, doomed = self.keep_last, list[Path]()
        for path, entry in reversed(self._entries.items()):
            if entry.is_of_helios or (not room and path in best) or is_pinned(path):
                continue
            if room and path not in self._damaged:
                room -= 1
            elif path not in best:
                doomed.append(path)
        for path in doomed:
            del self._entries[path]
        self._ranking = None if doomed else self._ranking
        return doomed[::-1]

    def _ranked_entries(self) -> list[Entry]:
        if self._monitor is None:
            return []
        if self._ranking is None:  # else as it was: there may be thousands
            judge = (self._monitor.name, self._monitor.mode)
            good = [each for path, each in self._entries.items() if path not in self._damaged]
            judged = {each: each.judged_by[2] for each in good if each.judged_by and each.judged_by[:2] == judge}
            self._ranking = best_first(judged, self._monitor.mode)
        return self._ranking
