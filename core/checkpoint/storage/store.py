"""The checkpoints of one training in one folder: saved, removed and pinned so that an intact one always exists."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from stat import S_ISREG
from time import time
from typing import Any

from ..state.schema import SCHEMA, WEIGHTS_ONLY
from . import reader
from .files import NOT_THERE, SYSTEM, Files, megabytes, prepare_folder
from .folder import Manifests
from .lock import Lock
from .manifest import (
    PINNED,
    SUFFIX,
    Entry,
    Hidden,
    JudgedBy,
    Label,
    check_name,
    manifest_path,
    pointer_path,
    shards_path,
)
from .recovery import finish_removal, interrupted_names, sweep
from .save_steps import put_manifest, take_in, write, write_manifest, write_small

logger = logging.getLogger("heliograph")


class Store:
    """Writes, lists and removes the checkpoints of a training, from one thread at a time.

    One store may be open for a run's name and folder: a second one, in another process or in this, is refused. The lock
    ends with its process. If the system has no `fcntl` (Windows), there is no lock.

    A program may give several trainings the same name. They share the lock and the order of writing; each has an id,
    and a name of its own for its files. The store neither removes nor overwrites checkpoints of another training.

    A checkpoint is `<name>.pth` with its manifest `<name>.json`. Both are written under hidden names and made durable,
    then renamed, the manifest last; it is durable when `save` returns. A file `<name>.pinned` (`touch` it) keeps it
    from being removed. The shards of several ranks are in the folder `<name>.shards`. `<run>.last` and `<run>.best`
    hold a file name each, for people and tools.

    Args:
        folder: the folder of the checkpoints; created if it is missing.
        run_name: the name that the program gave the run.
        training_id: the id of the training; by default, all trainings of this name.
        files: the operations on files, for tests.

    Attributes:
        name: the prefix of the training's files and pointers: see `write_as`.
    """

    def __init__(
        self, folder: Path, run_name: str, training_id: str | None = None, *, files: Files | None = None
    ) -> None:
        self.folder, self.run_name, self.name = folder, run_name, run_name
        self.training_id = training_id
        self._files = files or SYSTEM
        self._manifests = Manifests(folder, self._files)
        self._hidden = Hidden.of(folder, run_name)
        self._lock = self._lock_of(run_name)
        self._own_lock: Lock | None = None  # of the name of its files, where that is another
        self._is_tidy = False  # whether nothing failed since the last sweep
        self._has_just_looked = False  # at the folder, when the store was opened
        self._sequence: int | None = None  # the highest so far, while the store is open
        self._absent: set[Path] = set()  # pointers that are not there, as this store has seen to it

    def open(self, patience: float = 0.0) -> list[str]:
        """Acquire the lock, and finish or undo what an interrupted writer began; return notes on that.

        Args:
            patience: seconds to wait for another process to release the lock.

        Raises:
            ValueError: another process writes this run's checkpoints there (it is named), or nothing can be written.
            OSError: an interrupted save can be neither finished nor undone.
        """
        prepare_folder(self.folder)
        notes = []
        try:
            if not self._lock.acquire(patience):
                notes.append(f"{self.folder} has no file locks: nothing keeps a second process from writing this run.")
            with self._locks_of_interrupted(patience):
                notes += sweep(self._files, self.folder, self.run_name)
            self._sequence = reader.highest_sequence(self._manifests, self.run_name)
            self._has_just_looked = True
            return notes + reader.refused(self._manifests)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError) and not isinstance(error, IsADirectoryError):  # that one says what to do
                what = error.filename or "a file in it"
                raise OSError(
                    error.errno,
                    f"The folder of checkpoints {self.folder} cannot be put in order: {what} cannot be read or "
                    f"changed: {error.strerror or error}. Nothing was begun: start again when that works, or choose "
                    f"another folder.",
                ) from error
            raise

    def close(self) -> None:
        """Release the lock; closing twice does nothing."""
        self._sequence = None
        self._absent.clear()
        if self._own_lock is not None:
            self._own_lock.release()
        self._own_lock, self.name = None, self.run_name
        self._lock.release()

    def write_as(self, training_id: str, name: str) -> None:
        """Write the checkpoints of this training from now on, under this name.

        Raises:
            ValueError: another process writes under this name.
        """
        if name != self.name:
            lock = None if name == self.run_name else self._lock_of(name)
            if lock is not None:
                lock.acquire()
            if self._own_lock is not None:
                self._own_lock.release()
            self._own_lock = lock
            self._absent.clear()  # others may have written those of this name
        self.training_id, self.name = training_id, name

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        judged_by: JudgedBy | None = None,
        sequence: int | None = None,
        shards: Mapping[str, tuple[int, str]] | None = None,
        replace_unknown: bool = False,
        read_back: bool = True,
    ) -> Entry:
        """Write a checkpoint, and return when it is durable.

        A checkpoint of this training with the same name is replaced. If the name belongs to something else (a pinned or
        renamed checkpoint, one of another training, a file without a valid manifest), a number is added: use the
        entry's path.

        Args:
            name: the file name, which ends in `.pth`.
            state: plain types and tensors.
            judged_by: metric, mode and value by which it is ranked for the best.
            sequence: its number in the order of writing, for those of Helios; by default the next.
            shards: bytes and digest, by name, of the files in the folder that `begin_shards` returned.
            replace_unknown: replace a file without a valid manifest, too.
            read_back: read the data again before it gets its name.

        Raises:
            OSError: the disk is full, the folder read-only, the data read back differs, and the like; the message names
                the file and the free space. All former checkpoints are as they were.
            ValueError: the name is not valid, or the state is of another training.
        """
        newest = self._highest(state["run_name"])
        training = state["training_id"]
        if training != (self.training_id or training):
            raise ValueError(f"A state of training {training} was given to the store of {self.training_id}.")
        path, is_new = self._free_path(self.folder / check_name(name), training, replace_unknown)
        entry = self._entry(path, state, newest + 1 if sequence is None else sequence, judged_by)
        if shards or replace_unknown:
            entry = replace(entry, shards=dict(shards or {}), replaces=self._unknown(path) if replace_unknown else "")
        is_clear = is_new and self._is_tidy
        with self._changing():
            entry = write(self._files, self._hidden, entry, state, read_back=read_back, is_clear=is_clear)
        self._sequence, self._is_tidy = max(newest, entry.sequence), is_new  # of what is replaced, a file may be left
        return entry

    def begin_shards(self, needed: int) -> Path:
        """Return an empty folder for the shards of the next `save`, which renames it.

        Args:
            needed: bytes of all shards.

        Raises:
            OSError: there is not enough space, or the folder could not be created.
        """
        self._is_tidy = self._has_just_looked = False  # until a save has renamed the folder, or removed it
        sweep(self._files, self.folder, self.run_name)
        if needed > (free := self._files.free(self.folder)):
            raise OSError(
                errno.ENOSPC,
                f"The shards of a checkpoint in {self.folder} need {megabytes(needed, needed=True)}, "
                f"{megabytes(free)} are free: keep fewer or free some space",
            )
        self._hidden.shards.mkdir()
        return self._hidden.shards

    def take_in(self, path: Path) -> Entry:
        """Move a complete checkpoint here from another folder of the same file system; return its entry.

        It keeps its training and its sequence; a number is added to its name as in `save`.

        Raises:
            OSError: it could not be moved.
            ValueError: it has no manifest, or is of another run.
        """
        entry = reader.read_manifest(path, files=self._files)
        newest = self._highest(entry.family)
        free, _ = self._free_path(self.folder / path.name, entry.training, replace_unknown=False)
        entry = replace(entry, path=free)
        with self._changing():
            take_in(self._files, self._hidden, entry, path)
        self._sequence = max(newest, entry.sequence)
        return entry

    def adopt(self, name: str, state: Mapping[str, Any], sequence: int) -> Entry:
        """Write a manifest for a file that has lost its own, and return when it is durable; the file is not changed.

        Args:
            name: the file name.
            state: the content of the file.
            sequence: its number in the order of writing.

        Raises:
            OSError: the file could not be read, or the manifest not written.
            ValueError: the name is not valid, or the state is of another run.
        """
        newest, training = self._highest(state["run_name"]), state["training_id"]
        names = (each.run_name for each in self.entries()[0] if each.training == training)
        entry = self._entry(self.folder / check_name(name), state, sequence, None)
        entry = replace(entry, run_name=next(names, self.name))
        if "shards" in state:
            entry = replace(
                entry, shards={each.name: self._files.digest(each) for each in shards_path(entry.path).iterdir()}
            )
        with self._changing():
            entry = write_manifest(self._files, self._hidden, entry)
        self._sequence = max(newest, sequence)
        return entry

    def judge(self, entry: Entry, judged_by: JudgedBy) -> Entry:
        """Write into the manifest of a checkpoint by what it is ranked, and return when that is durable.

        Raises:
            OSError: the manifest could not be written; it is as it was.
        """
        entry = replace(entry, judged_by=judged_by)
        with self._changing():
            put_manifest(self._files, self._hidden, entry)
        return entry

    def steady(self) -> AbstractContextManager[None]:
        """Read the folder once, and use the result within the context; just after `open`, what that has read."""
        looks, self._has_just_looked = not self._has_just_looked, False
        return self._manifests.steady(looks=looks)

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Return the checkpoints of all trainings of the run's name, newest first, and notes on skipped files."""
        return reader.entries(self._manifests, self.run_name)

    def own(self) -> list[Entry]:
        """Return the training's checkpoints, newest first."""
        return [each for each in self.entries()[0] if each.training == (self.training_id or each.training)]

    def under(self, name: str) -> tuple[list[Entry], list[Path]]:
        """Return the checkpoints of trainings whose files have a name, and other files of that name."""
        return reader.under(self._manifests, name)

    def of_unknown_trainings(self, since: float) -> list[Path]:
        """Return the files under numbered names of this run, written since a time, whose training is unknown."""
        return reader.of_unknown_trainings(self._manifests, self.run_name, since)

    def gone(self) -> list[Entry]:
        """Return the checkpoints of this run of which only the manifests are left."""
        return reader.gone(self._manifests, self.run_name)

    def count(self) -> int:
        """Return how many checkpoints of this run there are, including files that are only named like one."""
        return reader.count(self._manifests, self.run_name)

    def newest(self) -> tuple[Entry | None, reader.State | None, list[str]]:
        """Return the newest intact checkpoint, its state, and a sentence for each one that was skipped."""
        return reader.newest(self._manifests, self.run_name)

    def remove(self, path: Path, training: str | None = None) -> bool:
        """Remove a checkpoint of the training, unless it is pinned or has no manifest; return whether it is gone.

        Args:
            path: the checkpoint.
            training: the id of another training, to remove a checkpoint of that one.

        Raises:
            OSError: it could not be removed.
        """
        if not self._is_tidy and self._files.exists(self._hidden.doomed):
            finish_removal(self._files, self._hidden)
        manifest = manifest_path(path)
        if self.is_pinned(path) or not self._files.exists(manifest):
            return not self._files.exists(path)
        try:
            entry = reader.read_manifest(path, files=self._files)
        except ValueError:  # its training is unknown
            return False
        if entry.training != (training or self.training_id or entry.training):
            return False
        with self._changing():
            self._files.rename(manifest, self._hidden.doomed)  # from now on it is not a checkpoint
            self._files.unlink(path)
            self._files.remove_folder(shards_path(path))
            self._files.unlink(self._hidden.doomed)
        return True

    def pin(self, path: Path) -> None:
        """Keep a checkpoint from being removed."""
        if not self.is_pinned(path):  # a link of that name pins it, too, and is not followed
            path.with_suffix(PINNED).touch()

    def is_pinned(self, path: Path) -> bool:
        """Return whether a checkpoint is pinned."""
        return self._files.exists(path.with_suffix(PINNED))

    def pointed(self, name: str) -> str | None:
        """Return the file name in the pointer to the last checkpoint of a name."""
        return reader.read_pointer(pointer_path(self.folder, name, "last"))

    def point(self, label: Label, path: Path | None) -> None:
        """Write the pointer to the last or best checkpoint, for people and tools; None removes it.

        After a power cut, the one to the last may be empty or cut short until a resume of the training writes it again.
        If a folder has its name, nothing is written, and a warning is logged.

        Raises:
            OSError: it could not be written.
        """
        pointer, name = pointer_path(self.folder, self.name, label), None if path is None else path.name
        if name is None and pointer in self._absent:  # nobody else writes it while the lock is held
            return
        if pointer.is_dir():  # not worth failing for
            logger.warning("A folder has the name of the pointer %s, which is not written: move it away", pointer)
            return
        if name is None:
            self._files.unlink(pointer)
            self._absent.add(pointer)
            return
        if reader.read_pointer(pointer) == name:
            return
        with self._changing():
            # `prune` spares what is called the best. The last is not worth a wait for the disk: a training that it does
            # not name takes another name where others have checkpoints under this one, so that nothing is lost
            write_small(self._files, self._hidden.pointer, f"{name}\n".encode(), syncs=label == "best")
            self._files.rename(self._hidden.pointer, pointer)
        self._absent.discard(pointer)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Note that the folder changes and, if that fails, that files may be left."""
        was, self._is_tidy, self._has_just_looked = self._is_tidy, False, False
        yield
        self._is_tidy = was

    @contextmanager
    def _locks_of_interrupted(self, patience: float) -> Iterator[None]:
        """Hold the locks of the names whose interrupted saves are finished or undone, as others may write them."""
        with ExitStack() as held:
            for name in sorted(interrupted_names(self._files, self.folder, self.run_name) - {self.run_name}):
                lock = self._lock_of(name)
                lock.acquire(patience)
                held.callback(lock.release)
            yield

    def _lock_of(self, name: str) -> Lock:
        return Lock(Hidden.of(self.folder, name).lock, f"The checkpoints of run {name!r} in {self.folder} are written")

    def _highest(self, run_name: str) -> int:
        """Return the highest sequence; raise ValueError if the store is closed or for runs of another name."""
        if self._sequence is None:
            raise ValueError(f"The store of {self.folder} is not open: call open() before save().")
        if run_name != self.run_name:
            raise ValueError(f"A state of run {run_name!r} was given to the store of {self.run_name!r}.")
        return self._sequence

    def _entry(self, path: Path, state: Mapping[str, Any], sequence: int, judged_by: JudgedBy | None) -> Entry:
        """Return the entry of a state; size and digest are not known yet."""
        return Entry(
            path=path,
            run_name=self.name,
            asked_name=self.run_name,
            training=state["training_id"],
            sequence=sequence,
            saved_at=state.get("saved_at", time()),
            size=0,
            sha256="",
            schema=SCHEMA,
            progress={name: count for name, count in state["progress"].items() if name != "streams"},
            metrics=state["metrics"],
            versions=state.get("versions", {}),
            world=state.get("world", {"size": 1}),
            judged_by=judged_by,
            weights_only=bool(state.get(WEIGHTS_ONLY)),
            forked_from=_fork_in_words(state.get("forked_from")),
        )

    def _free_path(self, wanted: Path, training: str, replace_unknown: bool) -> tuple[Path, bool]:
        """Return the wanted path, or the first numbered one that a training may use, and whether it is new."""
        path, number = wanted, 1
        while not (is_new := self._is_new(path)) and not self._may_write(path, training, replace_unknown):
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{SUFFIX}")
        return path, is_new

    def _is_new(self, path: Path) -> bool:
        """Return whether a checkpoint replaces nothing there."""
        parts = (path, manifest_path(path), shards_path(path), path.with_suffix(PINNED))
        return not any(self._files.exists(each) for each in parts)

    def _may_write(self, path: Path, training: str, replace_unknown: bool) -> bool:
        if self.is_pinned(path) or self._is_no_file(path):
            return False
        try:
            there = reader.read_manifest(path, files=self._files)
            return there.training == training and (replace_unknown or not (there.is_of_helios or there.is_renamed))
        except (ValueError, FileNotFoundError):
            return replace_unknown and not manifest_path(path).is_dir()
        except OSError:  # its training is unknown
            return False

    def _unknown(self, path: Path) -> str:
        """Return the digest of a file without a valid manifest, else "": finishing an interrupted save needs it."""
        try:
            reader.read_manifest(path, files=self._files)
        except FileNotFoundError:
            pass
        except ValueError:
            return self._files.digest(path)[1] if self._files.exists(path) else ""
        return ""

    def _is_no_file(self, path: Path) -> bool:
        """Return whether a name exists and is not a regular file: it is not replaced."""
        try:
            return not S_ISREG(self._files.patiently(partial(self._files.try_status, path)).st_mode)
        except NOT_THERE:
            return False


def _fork_in_words(origin: Mapping[str, Any] | None) -> str:
    return "" if origin is None else f"training {origin['training']} at step {origin['step']}"
