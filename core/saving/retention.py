"""Which checkpoints of a run are kept: the newest, the best, and those that somebody pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..monitor import Monitor
from ..storage import Entry
from ..storage.ranking import best_first


class Retention:
    """A run's checkpoints in the order of writing, and which of them may go.

    Args:
        keep_last: how many of the newest stay; None is all.
        keep_best: how many of the best stay besides.
        monitor: the metric that makes the best; a checkpoint that was judged by another one does not compete.

    Attributes:
        since: checkpoints up to this place in the order of writing are of an earlier run with the same name, which is
            another training: they neither go nor compete.
    """

    def __init__(self, keep_last: int | None, keep_best: int, monitor: Monitor | None) -> None:
        self._keep_last, self._keep_best, self._monitor = keep_last, keep_best, monitor
        self.begin(())

    def begin(self, entries: Iterable[Entry]) -> None:
        """Begin a run in a folder that holds these checkpoints."""
        self._entries: list[Entry] = []
        self.since = self._earlier = max((entry.sequence for entry in entries), default=0)

    def resume(self, entries: Iterable[Entry], path: Path | None) -> None:
        """Go on with what there is of this run; `since` is what its state tells.

        Args:
            entries: the checkpoints in the folder.
            path: the checkpoint that the run goes on from, if it is one.
        """
        entries = sorted(entries, key=lambda entry: entry.sequence)
        if path is not None:
            place = {entry.path.resolve(): entry.sequence for entry in entries}.get(path.resolve())
            if place is None:
                self.since = self._earlier  # what it tells is of another folder
            elif place <= self.since:
                self.since = 0  # it tells nothing
        self._entries = [entry for entry in entries if entry.sequence > self.since]

    def add(self, entry: Entry) -> None:
        """Enter a new checkpoint; it takes the place of one with the same path."""
        self._entries = [each for each in self._entries if each.path != entry.path] + [entry]

    @property
    def best(self) -> Entry | None:
        """The best: of equals the earlier; NaN is the worst."""
        return next(iter(self._ranked()), None)

    @property
    def rule(self) -> str:
        """Why a checkpoint is no longer kept, in words."""
        best = (
            "" if self._monitor is None else f", and not among the keep_best={self._keep_best} by {self._monitor.name}"
        )
        return f"keep_last={self._keep_last}{best}"

    def drop(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        """Forget the checkpoints that are no longer kept and return where they lie, the oldest first.

        Args:
            is_pinned: whether a checkpoint stays whatever happens; such ones do not count among the newest.
        """
        loose = [entry for entry in self._entries if not is_pinned(entry.path)]
        newest = loose if self._keep_last is None else loose[-self._keep_last :]
        kept = {entry.path for entry in (*newest, *self._ranked()[: self._keep_best])}
        doomed = [entry.path for entry in loose if entry.path not in kept]
        self._entries = [entry for entry in self._entries if entry.path not in doomed]
        return doomed

    def _ranked(self) -> list[Entry]:
        if self._monitor is None:
            return []
        judge = (self._monitor.name, self._monitor.mode)
        judged = {each: each.judged_by[2] for each in self._entries if each.judged_by and each.judged_by[:2] == judge}
        return best_first(judged, self._monitor.mode)
