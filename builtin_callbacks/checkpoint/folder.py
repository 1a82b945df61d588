"""The checkpoints of a run in its folder, as the main rank sees them: their names, what is kept, what is removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...core.checkpoint.storage import Entry, JudgedBy, State, Store, checkpoint_name
from ...events import Run, SavePoint
from .names import OnExisting, claim_name
from .retention import Retention
from .writers import Shards


class CheckpointFolder:
    """Writes, judges and removes the checkpoints of one training after the other. Used on the main rank only.

    Args:
        kept: says which are kept.

    Attributes:
        name: what the names of the training's files begin with; empty until it is known.
        damaged: newer checkpoints than the one that was resumed, which cannot be read.
    """

    def __init__(self, kept: Retention) -> None:
        self.kept = kept
        self._store: Store | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the previous run."""
        self.name = ""
        self.damaged: list[Path] = []
        self._replaces: list[Entry] = []
        self._newest: Entry | None = None  # of the training, when the run began
        self.kept.begin(())

    def open(self, run: Run, folder: Path) -> Store:
        """Return the run's store; it is closed while the plugin is switched off."""
        if self._store is None:
            store, source = Store(folder, run.name), run.checkpoint_source
            for line in store.open(patience=0.0 if source is None else source.patience):
                run.note(line)
            self._store = store
            if self.name:
                store.write_as(run.training_id, self.name)
        return self._store

    def close(self) -> None:
        """Let others write to the folder."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def claim(self, training_id: str, wanted: str, on_existing: OnExisting) -> list[str]:
        """Find the name that a training writes under; return what there is to say."""
        self._newest = None
        notes, self._replaces = claim_name(self._opened, training_id, wanted, on_existing)
        self.name = self._opened.name
        return notes

    def keep_newest(self) -> None:
        """Keep the newest checkpoint of the training for `find_own`, while nothing else changes the folder."""
        self._newest = next(iter(self._opened.own("recent")), None)

    def is_claimed_by(self, training_id: str) -> bool:
        """Return whether the file name is claimed by this training."""
        return bool(self.name) and self._opened.training_id == training_id

    def find_own(self) -> Entry | None:
        """Find what of the training is on disk; return the newest."""
        newest, self._newest = self._newest or next(iter(self._opened.own()), None), None
        self.kept.begin(self._read_own(), self.damaged)
        return newest

    def _read_own(self) -> Iterator[Entry]:
        yield from self._opened.own()

    @property
    def best(self) -> Path | None:
        """The best checkpoint."""
        return None if self.kept.best is None else self.kept.best.path

    def next_name(self, run: Run) -> str:
        """Return the name of a checkpoint that is written now.

        Raises:
            TypeError: what a plugin or the task adds to the name is not a string.
        """
        with run.engine.refusing("the label of a checkpoint", SavePoint.name):  # only one rank is here
            plugins = (each for each in run.plugins if run.plugins.is_enabled(each))
            sources = (getattr(each, "checkpoint_metadata", None) for each in (*plugins, run.task))
            source = next((each for each in sources if callable(each)), None)
            text = "" if source is None else source(run)
        if not isinstance(text, str):
            raise TypeError(f"The label of a checkpoint is a string, and the function returned {text!r}.")
        return checkpoint_name(self.name, run.progress.epoch, run.progress.steps, text)

    def write(
        self, name: str, judged_by: JudgedBy | None, state: State, shards: Shards | None, *, read_back: bool
    ) -> tuple[Path, Path | None]:
        """Write a checkpoint to the disk; return its path and the path of the best one.

        It is read back if intact ones are removed for it.
        """
        read_back = read_back or bool(self.damaged or self._replaces)
        entry = self._opened.save(name, state, judged_by=judged_by, shards=shards, read_back=read_back)
        self.kept.add(entry)
        return entry.path, self.best

    def begin_shards(self, needed: int) -> Path:
        """Return a new folder for shards of so many bytes."""
        return self._opened.begin_shards(needed)

    def tidy(
        self, last: Path, judged_by: JudgedBy | None, *, is_new: bool
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Rank the newest checkpoint, update the pointers, and remove the checkpoints that retention drops.

        If you moved or removed the newest one, retention continues with the checkpoints that still exist.

        Args:
            last: the newest.
            judged_by: what was measured of it after it was written, if anything.
            is_new: whether it was written just now, so that those are removed which the training replaces.

        Returns:
            The best, and what was removed, and why.
        """
        store, kept = self._opened, self.kept
        newest: Path | None = last
        if not last.exists():
            own = store.own()
            kept.begin(own, [path for path in self.damaged if kept.entry(path) is None])
            newest = own[0].path if own else None
        elif judged_by is not None and (entry := kept.entry(last)) is not None:
            kept.add(store.judge(entry, judged_by))
        dropped = [(path, f"{last.name} has the same step") for path in kept.drop_replaced(store.is_pinned)]
        best = self.best
        store.point("last", newest)
        store.point("best", best)
        dropped += [(path, kept.rule) for path in kept.drop(store.is_pinned)]
        removed = [(path, reason) for path, reason in dropped if store.remove(path)]
        if is_new and newest is not None:
            others, self._replaces = self._replaces, []
            gone = (each.path for each in others if store.remove(each.path, each.training))
            removed += [(path, "on_existing='replace'") for path in gone]
        return best, removed

    @property
    def _opened(self) -> Store:
        assert self._store is not None
        return self._store
