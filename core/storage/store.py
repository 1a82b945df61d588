"""The checkpoints of one run in one folder: written so that a whole one is there at every instant."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Any

from ..state import SCHEMA
from . import reading
from .files import Files, digest_of, prepare_folder
from .lock import Lock
from .manifest import Entry, JudgedBy, manifest_path, shards_path
from .names import PINNED, SUFFIX, Hidden, Label, check_name, pointer_path
from .recovery import finish_removal, sweep
from .saving import take_in, write, write_manifest, write_small


class Store:
    """Writes, lists and removes the checkpoints of a run, from one thread at a time.

    One store may be open per run and folder: a second one, of another process or of this, is refused. A killed process
    holds nothing. Where the system has no `fcntl` (Windows) there is no such lock.

    A checkpoint is `<name>.pth` with its manifest `<name>.json`. Both are written aside and made durable, then renamed,
    the manifest last; a save has happened when `save` returns. `<name>.pinned` beside it, which `touch` makes too,
    keeps it from being removed. The shards of several ranks lie in the folder `<name>.shards`. `<run>.last` and
    `<run>.best` hold a file name each, for people and tools.

    Args:
        folder: where the checkpoints lie; made where it is missing.
        run_name: whose they are.
        files: the operations on files, for tests.
    """

    def __init__(self, folder: Path, run_name: str, *, files: Files | None = None) -> None:
        self.folder, self.run_name = folder, run_name
        self._files = files or Files()
        self._hidden = Hidden.of(folder, run_name)
        self._lock = Lock(self._hidden.lock, f"The checkpoints of run {run_name!r} in {folder} are written")
        self._sequence: int | None = None  # the highest so far, while the store is open

    def open(self, patience: float = 0.0) -> list[str]:
        """Take the lock, and bring in order what an interrupted writer left; return what there is to say.

        Args:
            patience: seconds to wait for another process to let the lock go.

        Raises:
            ValueError: another process writes this run's checkpoints there (it is named), or nothing can be written.
            OSError: what was left cannot be brought in order.
        """
        prepare_folder(self.folder)
        notes = []
        try:
            if not self._lock.acquire(patience):
                notes.append(f"{self.folder} has no file locks: nothing keeps a second process from writing this run.")
            notes += sweep(self._files, self.folder, self.run_name)
            self._sequence = reading.highest_sequence(self.folder, self.run_name)
        except BaseException:
            self._lock.release()
            raise
        return notes

    def close(self) -> None:
        """Release the lock; closing twice does nothing."""
        self._sequence = None
        self._lock.release()

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        judged_by: JudgedBy | None = None,
        sequence: int | None = None,
        shards: Mapping[str, tuple[int, str]] | None = None,
        replace_unknown: bool = False,
    ) -> Entry:
        """Write a checkpoint, and return when it is durable.

        One of this run under the same name is replaced. Where the name belongs to something else (a pinned one, another
        run's, a file without a valid manifest), a number is added to it: go by the entry's path.

        Args:
            name: the file name, which ends in `.pth`.
            state: plain types and tensors.
            judged_by: metric, mode and value by which it competes for the best.
            sequence: its place in the order of writing; by default the next. For who brings in older checkpoints.
            shards: bytes and digest, by name, of the files that lie in the folder that `begin_shards` returned.
            replace_unknown: replace a file without a valid manifest, too.

        Raises:
            OSError: the disk is full, the folder read-only and the like; names the file and the free space. All former
                checkpoints are as they were.
            ValueError: the name is none, or the state is another run's.
        """
        newest = self._highest(state)
        path = self._free_path(self.folder / check_name(name), replace_unknown)
        entry = self._entry(path, state, newest + 1 if sequence is None else sequence, judged_by)
        entry = replace(entry, shards=dict(shards or {}))
        entry = write(self._files, self._hidden, entry, state)
        self._sequence = max(newest, entry.sequence)
        return entry

    def begin_shards(self, needed: int) -> Path:
        """Return an empty folder for the shards of the next save, which puts it in its place.

        Args:
            needed: bytes of all shards.

        Raises:
            OSError: there is no room for them, or the folder could not be made.
        """
        sweep(self._files, self.folder, self.run_name)
        if needed > (free := self._files.free(self.folder)):
            raise OSError(
                errno.ENOSPC,
                f"The shards of a checkpoint in {self.folder} need {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are "
                f"free: keep fewer or free some space",
            )
        self._hidden.shards.mkdir()
        return self._hidden.shards

    def take_in(self, path: Path) -> Entry:
        """Move a whole checkpoint of the run here, from another folder of the same file system; return its entry.

        It keeps its place in the order of writing; its name is treated as `save` treats one.

        Raises:
            OSError: it could not be moved.
            ValueError: it has no manifest, or it is another run's.
        """
        entry = reading.read_manifest(path)
        newest = self._highest({"run_name": entry.run_name})
        entry = replace(entry, path=self._free_path(self.folder / path.name, replace_unknown=True))
        take_in(self._files, self._hidden, entry, path)
        self._sequence = max(newest, entry.sequence)
        return entry

    def adopt(self, name: str, state: Mapping[str, Any], sequence: int) -> Entry:
        """Write a manifest for a file that has lost its own, and return when it is durable; the file stays as it is.

        Args:
            name: of the file.
            state: what was read from it.
            sequence: its place in the order of writing.

        Raises:
            OSError: the file could not be read, or the manifest not be written.
            ValueError: the name is none, or the state is another run's.
        """
        newest = self._highest(state)
        entry = self._entry(self.folder / check_name(name), state, sequence, None)
        if "shards" in state:
            entry = replace(entry, shards={each.name: digest_of(each) for each in shards_path(entry.path).iterdir()})
        entry = write_manifest(self._files, self._hidden, entry)
        self._sequence = max(newest, sequence)
        return entry

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Return this run's checkpoints, newest first, and a sentence for each file that was passed over."""
        return reading.entries(self.folder, self.run_name)

    def count(self) -> int:
        """Return how many checkpoints of this run there are, with those that only their names still tell of."""
        return reading.count(self.folder, self.run_name)

    def newest(self) -> tuple[Entry | None, reading.State | None, list[str]]:
        """Return the newest whole checkpoint, what is in it, and a sentence for each one that was passed over."""
        return reading.newest(self.folder, self.run_name)

    def remove(self, path: Path) -> bool:
        """Remove a checkpoint, unless it is pinned or has no manifest; return whether it is gone.

        Raises:
            OSError: it could not be removed.
        """
        if self._hidden.doomed.exists():
            finish_removal(self._files, self._hidden)
        manifest = manifest_path(path)
        if self.is_pinned(path) or not manifest.exists():
            return not path.exists()
        self._files.rename(manifest, self._hidden.doomed)  # from here on it is no checkpoint any more
        self._files.unlink(path)
        self._files.remove_folder(shards_path(path))
        self._files.unlink(self._hidden.doomed)
        return True

    def pin(self, path: Path) -> None:
        """Keep a checkpoint from being removed."""
        path.with_suffix(PINNED).touch()

    def unpin(self, path: Path) -> None:
        """Let a checkpoint be removed again."""
        path.with_suffix(PINNED).unlink(missing_ok=True)

    def is_pinned(self, path: Path) -> bool:
        """Return whether a checkpoint is kept whatever happens."""
        return path.with_suffix(PINNED).exists()

    def point(self, label: Label, path: Path | None) -> None:
        """Write down, for people and tools, which checkpoint is the last or the best; None removes the pointer.

        Raises:
            OSError: it could not be written.
        """
        pointer = pointer_path(self.folder, self.run_name, label)
        if path is None:
            self._files.unlink(pointer)
            return
        text = f"{path.name}\n".encode()
        if pointer.is_file() and pointer.read_bytes() == text:
            return
        write_small(self._files, self._hidden.pointer, text)
        self._files.rename(self._hidden.pointer, pointer)

    def _highest(self, state: Mapping[str, Any]) -> int:
        """Return the highest place in the order of writing, where the store is open and the state is its run's."""
        if self._sequence is None:
            raise ValueError(f"The store of {self.folder} is not open: call open() before save().")
        if state["run_name"] != self.run_name:
            raise ValueError(f"A state of run {state['run_name']!r} was given to the store of {self.run_name!r}.")
        return self._sequence

    def _entry(self, path: Path, state: Mapping[str, Any], sequence: int, judged_by: JudgedBy | None) -> Entry:
        """Return what there is to tell of a state; size and digest are not known yet."""
        return Entry(
            path=path,
            run_name=self.run_name,
            sequence=sequence,
            saved_at=state.get("saved_at", time()),
            size=0,
            sha256="",
            schema=SCHEMA,
            progress=state["progress"],
            metrics=state["metrics"],
            versions=state.get("versions", {}),
            world=state.get("world", {"size": 1}),
            judged_by=judged_by,
        )

    def _free_path(self, wanted: Path, replace_unknown: bool) -> Path:
        """Return the wanted path, or the first numbered one that may be written."""
        path, number = wanted, 1
        while not self._may_write(path, replace_unknown):
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{SUFFIX}")
        return path

    def _may_write(self, path: Path, replace_unknown: bool) -> bool:
        if self.is_pinned(path):
            return False
        if not any(each.exists() for each in (path, manifest_path(path), shards_path(path))):
            return True
        try:
            return reading.read_manifest(path).run_name == self.run_name
        except (ValueError, FileNotFoundError):
            return replace_unknown
