"""The checkpoints of a run in its folder, as the main rank sees them: their names, what is kept, what is removed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal

from ...core.checkpoint.storage import Entry, JudgedBy, State, Store, checkpoint_name
from ...events import Run, SavePoint
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
            store, source = Store(folder, run.name), run.checkpoints.source
            for line in store.open(patience=0.0 if source is None else source.patience):
                run.note(line)
            self._store = store
            if self.name:
                store.write_as(run.checkpoints.training_id, self.name)
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


OnExisting = Literal["new_name", "refuse", "replace"]
ON_EXISTING: tuple[OnExisting, ...] = ("new_name", "refuse", "replace")
logger = logging.getLogger("heliograph")


def warn_without_saver(run: Run, what: str) -> None:
    """Warn of a plugin that has no effect, as no plugin writes checkpoints."""
    if not any(callable(getattr(each, "where_saved", None)) for each in run.plugins):
        run.warn(f"{what} has no effect: no plugin writes checkpoints. Register Checkpoint(folder).")


def claim_name(store: Store, training_id: str, wanted: str, on_existing: OnExisting) -> tuple[list[str], list[Entry]]:
    """Let a store write for a training, under the wanted name unless that is another's.

    Returns:
        What there is to say, and the checkpoints of others that go as soon as one of this training is written.

    Args:
        store: an open one.
        training_id: the training.
        wanted: the name.
        on_existing: what to do where the name is another training's.

    Raises:
        ValueError: it is, and that is to be refused; or another process writes under the name.
    """
    known, unknown, number = store.under(wanted)
    others = [each for each in known if each.training != training_id]
    is_own = len(known) > len(others) or all(each.head and each.head.training == training_id for each in unknown)
    if is_own and not others:
        store.write_as(training_id, wanted)
        return [], []
    newest = max(others, key=lambda each: each.order, default=None)
    what = "without a manifest that can be used" if newest is None else f"in all, the newest is {newest.path.name}"
    there = f"{store.folder} holds another training under the name {wanted!r} ({number} {what})"
    if on_existing == "refuse":
        raise ValueError(
            f"{there}, and on_existing='refuse'. Continue it, resume='auto'; give this run another name= or folder; "
            f"or choose on_existing='new_name', which leaves it there and numbers the name of this one, or 'replace', "
            f"which removes it when the first checkpoint of this one is written."
        )
    if on_existing == "replace":
        store.write_as(training_id, wanted)
        others = [each for each in store.entries()[0] if each.run_name == wanted and each.training != training_id]
        removable = [each for each in others if each.is_removable]
        note = f"{there}: it is removed when the first checkpoint of this one is written, on_existing='replace'"
        if len(removable) < len(others):
            note += f"; {len(others) - len(removable)} stay, which were renamed or written by Helios"
        others = removable
    else:
        name = _take_free_name(store, training_id, wanted)
        others, note = [], f"{there}: it stays, and this one is written as {name!r}"
    logger.warning(note)
    return [note], others


def _take_free_name(store: Store, training_id: str, wanted: str) -> str:
    for number in count(2):
        name = f"{wanted}-{number}"
        known, _, number = store.under(name)
        if number > len(known) or any(each.training != training_id for each in known):
            continue
        try:
            store.write_as(training_id, name)
        except ValueError:  # of another process, which has not saved yet
            continue
        return name
    raise AssertionError
