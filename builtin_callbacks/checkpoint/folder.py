"""The checkpoint folder of a run on the main rank: names, retention, removal; the writer that works for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...core.checkpoint.schema import State
from ...core.checkpoint.storage import Entry, JudgedBy, Store, checkpoint_name
from ...core.checkpoint.storage.manifest import best_first
from ...core.distributed.outcomes import on_main, outcome_of, values_of_ranks
from ...core.metrics.monitor import Monitor
from ...events import SavePoint

if TYPE_CHECKING:
    from ...events import Run

T = TypeVar("T")
Shards = dict[str, tuple[int, str]]  # bytes and digest of files, by name


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

    A checkpoint may be removed only if a newer, intact one of the same training is kept.

    Args:
        entries: the checkpoints of one training, the newest first.
        keep_last: how many of the newest intact ones are kept, at least one; pinned ones are not counted.
        keep_best: how many of the best intact ones by `monitor` are kept in addition.
        monitor: the metric that ranks them, and its direction.
        is_pinned: called with a path.
        damage_to: called with a path; returns a description of the damage, or an empty text. It may read the whole
            file, so it is called only for checkpoints that would be kept.
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
        elif not entry.is_removable:
            reasons[path] = "renamed" if entry.is_renamed else "written by Helios, possibly by another training"
        elif not room:
            reasons[path] = ""
        elif damage := damage_to(path):
            is_newest = room == keep_last  # no newer one is intact
            reasons[path] = f"damaged, inspect it: {damage}" if is_newest else ""
        else:
            reasons[path] = "among the newest"
            room -= 1
    return reasons


def ranked(entries: Iterable[Entry], monitor: Monitor | None) -> list[Entry]:
    if monitor is None:
        return []
    judge = (monitor.name, monitor.mode)
    values = {entry: entry.judged_by[2] for entry in entries if entry.judged_by and entry.judged_by[:2] == judge}
    return best_first(values, monitor.mode)


class Retention:
    """The checkpoints of a run's training, in the order of writing; see `reasons_to_keep` for the arguments.

    `keep_last` None keeps all.
    """

    def __init__(self, keep_last: int | None, keep_best: int, monitor: Monitor | None) -> None:
        self.keep_last, self.keep_best, self._monitor = keep_last, keep_best, monitor
        self.begin(())

    def begin(self, entries: Iterable[Entry], damaged: Collection[Path] = ()) -> None:
        """Start with the checkpoints on disk.

        Args:
            entries: the checkpoints of the training; iterated only when needed, so that an iterator can read the files.
            damaged: the paths of damaged ones.
        """
        self._unread = entries
        self._entries: dict[Path, Entry] = {}
        self._damaged = set(damaged)
        self._newest: Entry | None = None  # the newest entry added since `begin`
        self._replaced: list[Path] = []
        self._rank()

    def add(self, entry: Entry) -> None:
        if self.keep_last is not None:
            self._read_entries()
        newest, self._newest = self._newest, entry
        step = entry.progress.get("steps", -1)
        if newest is not None and newest.path != entry.path and newest.progress.get("steps") == step:
            self._replaced.append(newest.path)
        self._entries.pop(entry.path, None)
        self._entries[entry.path] = entry
        self._damaged.discard(entry.path)
        self._rank()

    def update(self, entry: Entry) -> None:
        self._entries[entry.path] = entry
        self._rank()

    def entry(self, path: Path) -> Entry | None:
        self._read_entries()
        return None if path in self._damaged else self._entries.get(path)

    @property
    def rule(self) -> str:
        return f"keep_last={self.keep_last}" + f", keep_best={self.keep_best}" * (self._monitor is not None)

    def drop_replaced(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        doomed, self._replaced = [path for path in self._replaced if not is_pinned(path)], []
        for path in doomed:
            self._entries.pop(path, None)
        self._rank()
        return doomed

    def drop(self, is_pinned: Callable[[Path], bool]) -> list[Path]:
        if self.keep_last is None:
            return []
        self._read_entries()
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

    def _read_entries(self) -> None:
        entries, self._unread = self._unread, ()
        ordered = sorted(entries, key=lambda entry: entry.order)
        self._entries = {entry.path: entry for entry in ordered} | self._entries

    def _rank(self) -> None:
        if self._monitor is None:
            self.best: Entry | None = None
            return
        self._read_entries()
        ranking = ranked((entry for path, entry in self._entries.items() if path not in self._damaged), self._monitor)
        self.best = next(iter(ranking), None)


class CheckpointFolder:
    """Write, rank and remove the checkpoints of successive trainings. Used on the main rank only.

    Args:
        retention: decides which are kept.

    Attributes:
        name: the prefix of the training's files; empty until it is known.
        damaged: unreadable checkpoints that are newer than the resumed one.
    """

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self._store: Store | None = None
        self.begin()

    def begin(self) -> None:
        self.name = ""
        self.damaged: list[Path] = []
        self._replaces: list[Entry] = []
        self._newest: Entry | None = None  # of the training, when its name was claimed
        self.retention.begin(())

    def open(self, run: Run, folder: Path) -> Store:
        if self._store is None:
            store, source = Store(folder, run.name), run.checkpoints.source
            for line in store.open(patience=0.0 if source is None else source.patience):
                run.note(line)
            self._store = store
            if self.name:
                store.write_as(run.checkpoints.training_id, self.name)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def claim(self, training_id: str, wanted: str, on_existing: OnExisting) -> list[str]:
        notes, self._replaces = claim_name(self._opened, training_id, wanted, on_existing)
        self.name, self._newest = self._opened.name, next(iter(self._opened.own("recent")), None)
        return notes

    def is_claimed_by(self, training_id: str) -> bool:
        return bool(self.name) and self._opened.training_id == training_id

    def find_existing(self) -> Entry | None:
        self.retention.begin(self._read_entries(), self.damaged)
        return self._newest

    def _read_entries(self) -> Iterator[Entry]:
        yield from self._opened.own()

    @property
    def best(self) -> Path | None:
        return None if self.retention.best is None else self.retention.best.path

    def next_name(self, run: Run) -> str:
        with run.engine.refusing("the label of a checkpoint", SavePoint.name):  # only the main rank is here
            plugins = (plugin for plugin in run.plugins if run.plugins.is_enabled(plugin))
            sources = (getattr(owner, "checkpoint_metadata", None) for owner in (*plugins, run.task))
            source = next((source for source in sources if callable(source)), None)
            text = "" if source is None else source(run)
        if not isinstance(text, str):
            raise TypeError(f"The label of a checkpoint must be a string, the function returned {text!r}.")
        return checkpoint_name(self.name, run.progress.epoch, run.progress.steps, text)

    def write(
        self, name: str, judged_by: JudgedBy | None, state: State, shards: Shards | None, *, read_back: bool
    ) -> tuple[Path, Path | None]:
        read_back = read_back or bool(self.damaged or self._replaces)
        entry = self._opened.save(name, state, judged_by=judged_by, shards=shards, read_back=read_back)
        self.retention.add(entry)
        return entry.path, self.best

    def begin_shards(self, needed: int) -> Path:
        return self._opened.begin_shards(needed)

    def tidy(
        self, last: Path, judged_by: JudgedBy | None, *, is_new: bool, judged: Path | None = None
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Rank the newest checkpoint, update the pointers, and remove the checkpoints that retention drops.

        If you moved or removed the newest one, retention continues with the checkpoints that still exist.

        Args:
            last: the newest.
            judged_by: the metric measured after it or `judged` was written, if any.
            is_new: whether it was just written, so that checkpoints of a replaced training are removed.
            judged: another checkpoint that was measured.

        Returns:
            The best checkpoint; the removed ones, each with a reason.
        """
        store, retention = self._opened, self.retention
        newest: Path | None = last
        if not last.exists():
            entries = store.own()
            retention.begin(entries, [path for path in self.damaged if retention.entry(path) is None])
            newest = entries[0].path if entries else None
        elif judged_by is not None and (entry := retention.entry(judged or last)) and entry.path.exists():
            retention.update(store.judge(entry, judged_by))
        dropped = [(path, f"{last.name} has the same step") for path in retention.drop_replaced(store.is_pinned)]
        best = self.best
        store.point("last", newest)
        store.point("best", best)
        dropped += [(path, retention.rule) for path in retention.drop(store.is_pinned)]
        removed = [(path, reason) for path, reason in dropped if store.remove(path)]
        if is_new and newest is not None:
            replaced_entries, self._replaces = self._replaces, []
            removed_paths = (entry.path for entry in replaced_entries if store.remove(entry.path, entry.training))
            removed += [(path, "on_existing='replace'") for path in removed_paths]
        return best, removed

    @property
    def _opened(self) -> Store:
        assert self._store is not None
        return self._store


OnExisting = Literal["new_name", "refuse", "replace"]
ON_EXISTING: tuple[OnExisting, ...] = ("new_name", "refuse", "replace")


def warn_without_saver(run: Run, plugin_name: str) -> None:
    if not any(callable(getattr(plugin, "where_saved", None)) for plugin in run.plugins):
        run.warn(f"{plugin_name} has no effect: no plugin writes checkpoints. Register Checkpoint(folder).")


def claim_name(store: Store, training_id: str, wanted: str, on_existing: OnExisting) -> tuple[list[str], list[Entry]]:
    """Let a store write for a training under the wanted name, unless another training has it.

    Returns:
        Notes, and the checkpoints of other trainings to remove as soon as one of this training is written.

    Args:
        store: an open one.
        training_id: the training.
        wanted: the name.
        on_existing: the policy if another training has the name.

    Raises:
        ValueError: another training has the name and `on_existing` is "refuse", or another process writes under it.
    """
    entries, unreadable, _ = store.under(wanted)
    is_unreadable_own = all(file.head and file.head.training == training_id for file in unreadable)
    if all(entry.training == training_id for entry in entries) and (entries or is_unreadable_own):
        store.write_as(training_id, wanted)
        return [], []
    from .resume import settle_conflict  # imported when the folder has another training of the name

    return settle_conflict(store, training_id, wanted, on_existing)


class CheckpointWriter:
    """Write on the main rank while the loop waits; every rank receives the results.

    On several ranks all methods except `close` are collectives; so is `end`, unless the rank has left the group.

    Args:
        weights_only: save only the weights.
    """

    def __init__(self, *, weights_only: bool) -> None:
        self._weights_only = weights_only

    @property
    def is_idle(self) -> bool:
        return True

    def begin(self, run: Run) -> None: ...

    def hold(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._capture(run, shards)  # the loop waits, so nothing changes it

    def _capture(self, run: Run, shards: Mapping[str, Any] | None = None) -> dict[str, Any]:
        # the live state, reduced by `reduce_state` of plugins such as `TrainedOnly`; a collective
        state: dict[str, Any] = run.state_dict(shards, weights_only=self._weights_only)
        for plugin in run.plugins:
            if callable(reduce := getattr(plugin, "reduce_state", None)) and run.plugins.is_enabled(plugin):
                state = reduce(run, state)
        return state

    def do(self, run: Run, work: Callable[[], T], then: Callable[[T], object], *, is_save: bool = True) -> None:
        """Run `work` on the main rank; when it is done, call `then` with its result in the thread of the loop.

        If this rank must abandon the work, the run gets a note if `is_save`.
        """
        then(on_main(run.engine, watched(run, work)))

    def do_on_every_rank(self, run: Run, work: Callable[[], T], then: Callable[[list[T]], object]) -> None:
        then(values_of_ranks(run.engine, outcome_of(watched(run, work))))

    def drain(self) -> None: ...

    def end(self, run: Run) -> None: ...

    def close(self) -> None: ...


def watched(run: Run, work: Callable[[], T]) -> Callable[[], T]:
    # failures of other ranks do not end this process during the work
    engine = run.engine

    def guarded() -> T:
        with engine.writing():
            return work()

    return guarded
