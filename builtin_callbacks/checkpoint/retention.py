"""Which checkpoints of a training are kept: the newest, the best, and those that somebody pinned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ...core.checkpoint.storage import Entry
from ...core.checkpoint.storage.best_order import best_first
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
        self.begin(())

    def begin(self, entries: Iterable[Entry], damaged: Collection[Path] = ()) -> None:
        """Begin with what there is of a training.

        Args:
            entries: its checkpoints.
            damaged: where some lie that cannot be read; they count for nothing, and go when others go.
        """
        self._entries = sorted(entries, key=lambda entry: entry.sequence)
        self._damaged = set(damaged)

    def add(self, entry: Entry) -> None:
        """Enter a new checkpoint; it takes the place of one with the same path."""
        self._entries = [each for each in self._entries if each.path != entry.path] + [entry]
        self._damaged.discard(entry.path)

    def entry(self, path: Path) -> Entry | None:
        """Return the checkpoint that lies there, None where it is damaged or not known."""
        found = (each for each in self._entries if each.path == path and path not in self._damaged)
        return next(found, None)

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
        loose = [entry for entry in self._entries if entry.training_id and not is_pinned(entry.path)]
        good = [entry for entry in loose if entry.path not in self._damaged]
        kept = {entry.path for entry in (*good[-self.keep_last :], *self._ranked_entries()[: self.keep_best])}
        doomed = [entry.path for entry in loose if entry.path not in kept]
        gone = set(doomed)
        self._entries = [entry for entry in self._entries if entry.path not in gone]
        return doomed

    def _ranked_entries(self) -> list[Entry]:
        if self._monitor is None:
            return []
        judge = (self._monitor.name, self._monitor.mode)
        good = [each for each in self._entries if each.path not in self._damaged]
        judged = {each: each.judged_by[2] for each in good if each.judged_by and each.judged_by[:2] == judge}
        return best_first(judged, self._monitor.mode)
