"""The checkpoints of one training in one folder: saved, removed and pinned so that an intact one always exists."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG
from time import time, time_ns
from typing import Any

from ..state.compaction import compacted
from ..state.schema import WEIGHTS_ONLY
from . import reader
from .archive import rewrite_manifest, write_checkpoint, write_small
from .files import NOT_THERE, SYSTEM, Files, megabytes, prepare_folder
from .folder import FoundFile, Manifests, read_pointer
from .lock import Lock
from .manifest import MOST, PINNED, SUFFIX, Entry, Hidden, JudgedBy, Label, SchemaError, check_name, pointer_path

logger = logging.getLogger("heliograph")
UNTOUCHED = "Former checkpoints are untouched."
MAY_BE_LOST = "It has replaced the former file of that name, and may be lost if the system crashes."
Shards = Mapping[str, tuple[int, str]]  # bytes and digest of files, by name


class Store:
    """Writes, lists and removes the checkpoints of a training, from one thread at a time.

    One store may be open for a run's name and folder: a second one, in another process or in this, is refused. The lock
    ends with its process. If the file system has no locks, there is none.

    A program may give several trainings the same name. They share the lock and the order of writing; each has an id,
    and a name of its own for its files. The store neither removes nor overwrites checkpoints of another training.

    A checkpoint is one file, `<name>.pth`, which ends with its manifest. It is written under a hidden name, made
    durable, and renamed: so it is there, or not. A file `<name>.pinned` (`touch` it) keeps it from being removed. The
    shards of several ranks are in a folder that its manifest names. `<run>.last` and `<run>.best` hold a file name
    each, for people and tools.

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
        self._own_lock = self._lock_of(run_name)  # held for the name of its files, if that is another
        self._has_just_looked = False  # at the folder, when the store was opened
        self._is_tidy = False  # whether nothing failed since the last sweep
        self._sequence: int | None = None  # the highest so far, while the store is open
        self._date = 0  # of the latest file
        self._pointed: dict[Path, str | None] = {}  # what the pointers say, as this store has seen to it

    def open(self, patience: float = 0.0) -> list[str]:
        """Acquire the lock, and remove what an interrupted writer left; return notes on that.

        Args:
            patience: seconds to wait for another process to release the lock.

        Raises:
            ValueError: another process writes this run's checkpoints there (it is named), or nothing can be written.
            OSError: what an interrupted save left cannot be removed.
        """
        prepare_folder(self.folder)
        notes = []
        try:
            if not self._lock.acquire(patience):
                notes.append(f"{self.folder} has no file locks: nothing keeps a second process from writing this run.")
            with self._manifests.steady():
                found = self._manifests.recent(self.run_name)
                self._date = max(max(stamp[2:3], default=0) for stamp in [(), *self._manifests.names().values()])
            notes += self._sweep()
            for former in {each.entry.former_shards for each in found if each.entry and each.run_name == self.run_name}:
                self._remove_shards(former)
            self._sequence = reader.highest_sequence(found, self.run_name)
            self._has_just_looked = True
            return notes + reader.refused(found)
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
        self._pointed.clear()
        self._own_lock.release()
        self.name = self.run_name
        self._lock.release()

    def write_as(self, training_id: str, name: str) -> None:
        """Write the checkpoints of this training from now on, under this name.

        Raises:
            ValueError: another process writes under this name.
        """
        if name != self.name:
            lock = self._lock_of(name)
            if name != self.run_name:
                lock.acquire()
            self._own_lock.release()
            self._own_lock = lock
            self._pointed.clear()  # others may have written those of this name
        self.training_id, self.name = training_id, name

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        judged_by: JudgedBy | None = None,
        sequence: int | None = None,
        shards: Shards | None = None,
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
                the file and the free space. All former checkpoints are as they were, unless the file system has no hard
                links and the last sync failed: then the new file keeps the name of the one that it replaced.
            ValueError: the name is not valid, the state is of another training, or its manifest would be too long.
        """
        newest = self._highest(state["run_name"])
        training = state["training_id"]
        if training != (self.training_id or training):
            raise ValueError(f"A state of training {training} was given to the store of {self.training_id}.")
        path, replaces, former = self._free_path(self.folder / check_name(name), training, replace_unknown)
        entry = self._entry(path, state, newest + 1 if sequence is None else sequence, judged_by)
        entry = replace(entry, former_shards=former.shards[0] if former and former.shards else "")
        files, hidden, outcome = self._files, self._hidden, UNTOUCHED
        try:
            if not self._begin_change() and not shards:
                self._sweep()
            state, needed = compacted(state)
            _check_room(files, self.folder, needed, "it")
            try:
                if shards:
                    folder, digests = f"{path.stem}.{token_hex(4)}.shards", json.dumps(shards, indent=1).encode()
                    write_small(files, hidden.shards / reader.DIGESTS, digests)
                    entry = replace(entry, shards=(folder, sha256(digests).hexdigest()))
                    state = {**state, "shards": {**state.get("shards", {}), "folder": folder}}
                entry = write_checkpoint(files, hidden.data, state, entry, self._next_date(), read_back=read_back)
                self._put_in_place(entry, replaces)
            except BaseException as error:
                if not self._undo(entry, replaces, error):
                    self._sequence, outcome = max(newest, entry.sequence), MAY_BE_LOST
                raise
        except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
            raise _failure(files, path, error, outcome) from error
        if entry.former_shards:
            with suppress(OSError):  # the save is complete; the next start removes them
                self._remove_shards(entry.former_shards)
        self._sequence, self._is_tidy = max(newest, entry.sequence), True
        return entry

    def begin_shards(self, needed: int) -> Path:
        """Return an empty folder for the shards of the next `save`, which renames it.

        Args:
            needed: bytes of all shards.

        Raises:
            OSError: there is not enough space, or the folder could not be created.
        """
        self._begin_change()  # until a save has renamed the folder
        self._sweep()
        _check_room(self._files, self.folder, needed, f"writing the shards of a checkpoint in {self.folder}")
        self._hidden.shards.mkdir()
        return self._hidden.shards

    def take_in(self, path: Path) -> Entry:
        """Move a complete checkpoint here from another folder of the same file system; return its entry.

        It keeps its training and its sequence; a number is added to its name as in `save`, in its manifest, too.

        Raises:
            OSError: it could not be moved.
            ValueError: it has no manifest, or is of another run.
        """
        entry = reader.read_manifest(path, files=self._files)
        newest = self._highest(entry.family)
        free, _, former = self._free_path(self.folder / path.name, entry.training, replace_unknown=False)
        is_numbered = free.name != path.name and not entry.is_renamed
        self._begin_change()
        self._sweep()
        if is_numbered:  # under a name that is not in its manifest, it would count as renamed
            entry = replace(entry, name=free.name)
            rewrite_manifest(self._files, path, self._hidden.data, entry, self._next_date())
        else:
            self._files.rename(path, self._hidden.data)  # if it is killed from here on, the next start removes it
        if entry.shards:
            self._files.rename(path.with_name(entry.shards[0]), self.folder / entry.shards[0])
        self._files.rename(self._hidden.data, free)
        self._files.sync_folder(self.folder)
        if is_numbered:
            self._files.unlink(path)
        self._is_tidy = True
        if former and former.shards:
            self._remove_shards(former.shards[0])
        self._sequence = max(newest, entry.sequence)
        return replace(entry, path=free)

    def judge(self, entry: Entry, judged_by: JudgedBy) -> Entry:
        """Write into a checkpoint by what it is ranked, and return when that is durable.

        The file is written again beside itself and renamed: hard links to it, such as a backup, stay as they are. If it
        is a symbolic link, the file that the link names is written again.

        Raises:
            OSError: it could not be written, or there is no room for a second file; the checkpoint is as it was.
        """
        entry, files = replace(entry, judged_by=judged_by), self._files
        path = entry.path.resolve() if entry.path.is_symlink() else entry.path
        aside = path.with_name(self._hidden.data.name)
        was = self._begin_change()
        try:
            _check_room(files, path.parent, entry.size + MOST, "judging it")
            try:
                rewrite_manifest(files, path, aside, entry, self._next_date())
            except BaseException:
                with suppress(OSError):  # else the next save or start removes it
                    files.unlink(aside)
                raise
            files.rename(aside, path)
            files.sync_folder(path.parent)
        except OSError as error:
            raise _failure(files, entry.path, error) from error
        self._is_tidy = was
        return entry

    def steady(self) -> AbstractContextManager[None]:
        """Read the folder once, and use the result within the context; just after `open`, what that has read."""
        looks, self._has_just_looked = not self._has_just_looked, False
        return self._manifests.steady(looks=looks)

    def entries(self, scope: reader.Scope = "run") -> tuple[list[Entry], list[str]]:
        """Return the checkpoints of all trainings of the run's name, newest first, and notes on skipped files.

        `scope`: which manifests are read; see `reader.entries`.
        """
        return reader.entries(self._manifests, self.run_name, scope)

    def own(self, scope: reader.Scope = "run") -> list[Entry]:
        """Return the training's checkpoints, newest first; see `entries`."""
        return [each for each in self.entries(scope)[0] if each.training == (self.training_id or each.training)]

    def under(self, name: str) -> tuple[list[Entry], list[FoundFile], int]:
        """Return checkpoints of trainings whose files have a name, other files of that name, and how many there are.

        Only the newest ones are returned, if one of them has the name.
        """
        return reader.under(self._manifests, self.run_name, name)

    def lost(self, scope: reader.Scope = "run") -> list[FoundFile]:
        """Return the damaged files that were checkpoints of this run's name, as their beginning says."""
        return reader.lost(self._manifests, self.run_name, scope)

    def newest(self) -> tuple[Entry | None, reader.State | None, list[str]]:
        """Return the newest intact checkpoint, its state, and a sentence for each one that was skipped."""
        return reader.newest(self._manifests, self.run_name)

    def load(self, path: Path) -> reader.State:
        """Return the state in a checkpoint in any folder, verified; see `reader.load`."""
        return reader.load(path, files=self._files)

    def verify(self, path: Path) -> Entry:
        """Verify every byte of a checkpoint in any folder; see `reader.check`."""
        return reader.check(path, files=self._files)

    def files_of(self, path: Path) -> list[Path]:
        """Return the files of a checkpoint in any folder: its own, and those in its folder of shards.

        Raises:
            ValueError: it has no manifest, or a shard is missing or has another size.
        """
        entry = reader.read_manifest(path, files=self._files)
        if not reader.is_complete(entry):
            raise ValueError(f"The checkpoint {path} is not complete: shards of it are missing, or have another size.")
        return [path] if entry.shards is None else [path, *sorted(reader.shards_path(entry).iterdir())]

    def scratch(self, kind: str) -> Path:
        """Return the path of a hidden folder beside the checkpoints, for other files of this run."""
        return self._hidden.lock.with_suffix(f".{kind}")

    def remove(self, path: Path, training: str | None = None) -> bool:
        """Remove a checkpoint of the training; return whether it was removed.

        A pinned or renamed checkpoint, one of Helios, and a file without a valid manifest stay.

        Args:
            path: the checkpoint.
            training: the id of another training, to remove a checkpoint of that one.

        Raises:
            OSError: it could not be removed.
        """
        if self.is_pinned(path):
            return False
        try:
            entry = reader.read_manifest(path, files=self._files)
        except (ValueError, FileNotFoundError):  # its training is unknown, or it was moved away just now
            return False
        if entry.training != (training or self.training_id or entry.training) or not entry.is_removable:
            return False
        was = self._begin_change()
        if entry.shards:  # under its hidden name, it says which shards go with it
            self._files.rename(path, self._hidden.data)
            self._sweep()
        else:
            self._files.unlink(path)
            self._is_tidy = was
        return True

    def pin(self, path: Path) -> None:
        """Keep a checkpoint from being removed."""
        if not self.is_pinned(path):  # a link of that name pins it, too, and is not followed
            path.with_suffix(PINNED).touch()

    def is_pinned(self, path: Path) -> bool:
        """Return whether a checkpoint is pinned."""
        return self._files.exists(path.with_suffix(PINNED))

    def point(self, label: Label, path: Path | None) -> None:
        """Write the pointer to the last or best checkpoint, for people and tools; None removes it.

        After a power cut, the one to the last may be empty or cut short until a resume of the training writes it again.
        If a folder has its name, nothing is written, and a warning is logged.

        Raises:
            OSError: it could not be written.
        """
        pointer, name = pointer_path(self.folder, self.name, label), None if path is None else path.name
        if pointer in self._pointed and self._pointed[pointer] == name:  # nobody else writes it
            return
        try:
            if name is None:
                self._files.unlink(pointer)
            elif pointer in self._pointed or read_pointer(pointer) != name:
                was = self._begin_change()
                # `prune` spares what is called the best. The last is a hint only, and not worth a wait for the disk.
                write_small(self._files, self._hidden.small, f"{name}\n".encode(), syncs=label == "best")
                self._files.rename(self._hidden.small, pointer)
                self._is_tidy = was
        except IsADirectoryError:  # not worth failing for
            logger.warning("A folder has the name of the pointer %s, which is not written: move it away", pointer)
        else:
            self._pointed[pointer] = name

    def _sweep(self) -> list[str]:
        """Remove what an interrupted save or removal left: what has a hidden name, and the shards that it names."""
        hidden, files = self._hidden, self._files
        left = [path for path in (hidden.data, hidden.former, hidden.small, hidden.shards) if files.exists(path)]
        if hidden.data in left:
            with suppress(ValueError, FileNotFoundError):  # it was not complete, or is a link to nothing
                if shards := reader.read_manifest(hidden.data, files=files).shards:
                    self._remove_shards(shards[0])
        for path in left:
            files.remove_folder(path) if path == hidden.shards else files.unlink(path)
        return [f"An interrupted save left {', '.join(path.name for path in left)}: removed."] if left else []

    def _remove_shards(self, name: str) -> None:
        """Remove a folder of shards, unless a checkpoint in the folder names it, or one that cannot be read may."""
        folder = self.folder / name
        if name and self._files.exists(folder):
            found = self._manifests.look(again=True)
            is_unsure = any(isinstance(each.problem, (OSError, SchemaError)) for each in found)
            if not is_unsure and not any(each.entry and (each.entry.shards or ("",))[0] == name for each in found):
                self._files.remove_folder(folder)

    def _put_in_place(self, entry: Entry, replaces: bool) -> None:
        """Rename what was written: the last of it is the commit."""
        files, hidden, path = self._files, self._hidden, entry.path
        if entry.shards:
            files.sync_folder(hidden.shards)
            files.sync_folder(self.folder)  # the file says which shards to remove, if it does not get its name
            files.rename(hidden.shards, self.folder / entry.shards[0])
        if replaces:
            with suppress(NotImplementedError):
                files.link(path, hidden.former)
        files.rename(hidden.data, path)
        files.sync_folder(self.folder)
        if replaces:
            files.unlink(hidden.former)

    def _undo(self, entry: Entry, replaces: bool, error: BaseException) -> bool:
        """Undo a save, by the files that exist: an interrupt may come between any two steps.

        Return False if the new file stays: it has replaced one that cannot be restored, as there are no hard links.
        """
        files, hidden, is_restored = self._files, self._hidden, not replaces
        try:
            if not files.exists(hidden.data) and self._is_at(entry):  # it was renamed
                if files.exists(hidden.former):
                    files.rename(hidden.former, entry.path)
                elif replaces:
                    return False
                else:
                    files.unlink(entry.path)
            is_restored = True
            if entry.shards:
                files.remove_folder(self.folder / entry.shards[0])
            self._sweep()
        except OSError as second:
            error.add_note(f"Undoing the save failed too, the next save or start will see to it: {second}")
        return is_restored

    def _is_at(self, entry: Entry) -> bool:
        with suppress(ValueError, OSError):
            return reader.read_manifest(entry.path, files=self._files).sha256 == entry.sha256
        return False

    def _lock_of(self, name: str) -> Lock:
        return Lock(Hidden.of(self.folder, name).lock, f"The checkpoints of run {name!r} in {self.folder} are written")

    def _highest(self, run_name: str) -> int:
        """Return the highest sequence; raise ValueError if the store is closed or for runs of another name."""
        if self._sequence is None:
            raise ValueError(f"The store of {self.folder} is not open: call open() before save().")
        if run_name != self.run_name:
            raise ValueError(f"A state of run {run_name!r} was given to the store of {self.run_name!r}.")
        return self._sequence

    def _begin_change(self) -> bool:
        """Note that the folder changes; return whether nothing has failed since the last sweep."""
        was, self._is_tidy, self._has_just_looked = self._is_tidy, False, False
        return was

    def _next_date(self) -> int:
        """Return the time of a new file: later than all before, even if the clock was set back; see `recent`."""
        self._date = max(self._date + 1, time_ns())
        return self._date

    def _entry(self, path: Path, state: Mapping[str, Any], sequence: int, judged_by: JudgedBy | None) -> Entry:
        """Return the entry of a state; size and digest are not known yet."""
        origin = state.get("forked_from")
        return Entry(
            path=path,
            run_name=self.name,
            asked_name=self.run_name,
            training=state["training_id"],
            sequence=sequence,
            saved_at=state.get("saved_at", time()),
            size=0,
            sha256="",
            progress={name: count for name, count in state["progress"].items() if name != "streams"},
            metrics=state["metrics"],
            versions=state.get("versions", {}),
            judged_by=judged_by,
            weights_only=bool(state.get(WEIGHTS_ONLY)),
            forked_from="training {training} at step {step}".format_map(origin) if origin else "",
            name=path.name,
        )

    def _free_path(self, wanted: Path, training: str, replace_unknown: bool) -> tuple[Path, bool, Entry | None]:
        """Return the wanted path, or the first numbered one that a training may use, and what it replaces there."""
        path, number = wanted, 1
        while (place := self._what_is_replaced(path, training, replace_unknown)) is None:
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{SUFFIX}")
        return path, *place

    def _what_is_replaced(self, path: Path, training: str, replace_unknown: bool) -> tuple[bool, Entry | None] | None:
        """Return whether a file is at a path, and its entry; None if the training may not write there."""
        if self.is_pinned(path):
            return None
        try:
            status = self._files.patiently(partial(self._files.try_status, path))
        except NOT_THERE:
            return False, None
        try:
            there = reader.read_manifest(path, files=self._files) if S_ISREG(status.st_mode) else None
            is_own = there and there.training == training and (replace_unknown or there.is_removable)
            return (True, there) if is_own else None
        except (ValueError, FileNotFoundError):
            return (True, None) if replace_unknown else None
        except OSError:  # its training is unknown
            return None


def _check_room(files: Files, folder: Path, needed: int, what: str) -> None:
    """Raise OSError if the file system has fewer free bytes."""
    if needed > (free := files.free(folder)):
        size, room = megabytes(needed, needed=True), f"{megabytes(free)} are free"
        raise OSError(errno.ENOSPC, f"{what} needs {size} and was not begun, keep fewer or free some space ({room})")


def _failure(files: Files, path: Path, error: Exception, outcome: str = UNTOUCHED) -> OSError:
    try:
        room = f"{megabytes(files.free(path.parent))} are free in its folder"
    except FileNotFoundError:
        room, outcome = "its folder is gone", ""
    except OSError as second:
        room = f"how much is free in its folder cannot be read: {second}"
    failure = OSError(f"The checkpoint {path} could not be written ({room}): {error}. {outcome}".rstrip())
    failure.errno = getattr(error, "errno", None)
    return failure
