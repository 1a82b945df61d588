"""Which checkpoints are kept and which may be removed, in a run and by `checkpoint prune`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from ...core.checkpoint.storage import Entry
from ...core.checkpoint.storage.manifest import best_first
from ...core.metrics.monitor import Monitor


def reasons_to_keep(
    entries: Sequence[Entry],
    *,
    keep_last: int,
    keep_best: int,
    monitor: Monitor | None,
    is_pinned: Callable[[Path], bool],
    damage_to: Callable[[Path], str],
) -> dict[Path, str]:
    """Return why each checkpoint of a training is kept; an empty text if it may be removed.

    A checkpoint may be removed only if an intact one of the same training is newer and is kept.

    Args:
        entries: the checkpoints of one training, the newest first.
        keep_last: how many of the newest intact ones are kept, at least one; pinned ones are not counted.
        keep_best: how many of the best intact ones by `monitor` are kept as well.
        monitor: the metric that ranks them, and its direction.
        is_pinned: called with a path.
        damage_to: called with a path; returns what is damaged, or an empty text. It may read the whole file, so it is
            called only for checkpoints that would be kept.
    """
    intact = (entry.path for entry in ranked(entries, monitor) if not damage_to(entry.path))
    best = set(islice(intact, keep_best))
    reasons, room = dict[Path, str](), keep_last
    for entry in entries:
        path = entry.path
        if monitor is not None and not room and path in best:
            reasons[path] = f"among the best by {monitor.name}"
        elif is_pinned(path):
            reasons[path] = "pinned"
        elif entry.is_renamed:
            reasons[path] = "renamed"
        elif entry.is_of_helios:
            reasons[path] = "written by Helios, it may be of another training"
        elif not room:
            reasons[path] = ""
        elif damage := damage_to(path):
            is_newest = room == keep_last  # no newer one is known to be intact
            reasons[path] = f"damaged, look at it: {damage}" if is_newest else ""
        else:
            reasons[path] = "among the newest"
            room -= 1
    return reasons


def ranked(entries: Iterable[Entry], monitor: Monitor | None) -> list[Entry]:
    """Return the checkpoints that were judged by a metric, the best first.

    NaN is the worst, and of equal ones the earlier is better.
    """
    if monitor is None:
        return []
    judge = (monitor.name, monitor.mode)
    values = {entry: entry.judged_by[2] for entry in entries if entry.judged_by and entry.judged_by[:2] == judge}
    return best_first(values, monitor.mode)


def by_training(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the checkpoints grouped by training, in the given order."""
    trainings: dict[str, list[Entry]] = {}
    for entry in entries:
        trainings.setdefault(entry.training, []).append(entry)
    return list(trainings.values())


class Retention:
    """The checkpoints of a run's training, in the order of writing.

    Args:
        keep_last: see `reasons_to_keep`; None keeps all.
        keep_best: see there.
        monitor: see there.
    """

    def __init__(self, keep_last: int | None, keep_best: int, monitor: Monitor | None) -> None:
        self.keep_last, self.keep_best, self._monitor = keep_last, keep_best, monitor
        self.begin(())

    def begin(self, entries: Iterable[Entry], damaged: Collection[Path] = ()) -> None:
        """Begin with the checkpoints on disk.

        Args:
            entries: those of the training; iterated over when they are needed, so that an iterator may read the files.
            damaged: the paths of damaged ones.
        """
        self._unread = entries
        self._entries: dict[Path, Entry] = {}
        self._damaged = set(damaged)
        self._newest: Entry | None = None  # the newest entry added since `begin`
        self._replaced: list[Path] = []
        self._rank()

    def add(self, entry: Entry) -> None:
        """Add a new checkpoint; it replaces one with the same path, and the previous one if that has the same step."""
        if self.keep_last is not None:
            self._look()
        newest, self._newest = self._newest, entry
        step = entry.progress.get("steps", -1)
        if newest is not None and newest.path != entry.path and newest.progress.get("steps") == step:
            self._replaced.append(newest.path)
        self._entries.pop(entry.path, None)
        self._entries[entry.path] = entry
        self._damaged.discard(entry.path)
        self._rank()

    def entry(self, path: Path) -> Entry | None:
        """Return the checkpoint at a path; None if it is damaged or not known."""
        self._look()
        return None if path in self._damaged else self._entries.get(path)

    @property
    def rule(self) -> str:
        """Why a checkpoint is no longer kept, in words."""
        best = (
            "" if self._monitor is None else f", and not among the keep_best={self.keep_best} by {self._monitor.name}"
        )
        return f"keep_last={self.keep_last}{best}"

    def drop_replaced(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        """Forget the checkpoints of whose step there is a newer one and return their paths, unless they are pinned."""
        doomed, self._replaced = [path for path in self._replaced if not is_pinned(path)], []
        for path in doomed:
            self._entries.pop(path, None)
        self._rank()
        return doomed

    def drop(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        """Forget the checkpoints that are no longer kept and return their paths, the oldest first."""
        if self.keep_last is None:
            return []
        self._look()
        reasons = reasons_to_keep(
            [*reversed(self._entries.values())],
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            monitor=self._monitor,
            is_pinned=is_pinned,
            damage_to=lambda path: "it cannot be read" if path in self._damaged else "",
        )
        doomed = [path for path in reversed(reasons) if not reasons[path]]
        for path in doomed:
            del self._entries[path]
        return doomed

    def _look(self) -> None:
        entries, self._unread = self._unread, ()
        found = sorted(entries, key=lambda entry: entry.order)
        self._entries = {entry.path: entry for entry in found} | self._entries

    def _rank(self) -> None:
        if self._monitor is None:
            self.best: Entry | None = None
            return
        self._look()
        ranking = ranked((entry for path, entry in self._entries.items() if path not in self._damaged), self._monitor)
        self.best = next(iter(ranking), None)
