"""Save, remove and pin the checkpoints of one training so that an intact one always exists."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from time import time, time_ns
from typing import Any, get_args

from ..schema import WEIGHTS_ONLY, State
from . import inventory, manifest
from .archive import compacted, rewrite_manifest, write_checkpoint, write_small
from .files import SYSTEM, Files, megabytes, prepare_folder
from .inventory import FoundFile, Manifests, read_pointer
from .lock import Lock
from .manifest import Entry, Hidden, JudgedBy, Label, SchemaError, check_name, pointer_path

UNTOUCHED = "Previous checkpoints are unchanged."
MAY_BE_LOST = "It has replaced the previous file of that name; if the system crashes, either may remain."
Shards = Mapping[str, tuple[int, str]]  # bytes and digest of files, by name


class Store:
    """Write, list and remove the checkpoints of a training, from one thread at a time.

    Only one store can be open for a run's name and folder: a second one, in another process or the same, is refused.
    The lock ends with its process. If the file system has no locks, nothing is locked.

    A program may give several trainings the same name. They share the lock and the order of writing; each training has
    an id, and its own name for its files. The store neither removes nor overwrites checkpoints of another training.

    A checkpoint is one file, `<name>.pth`, which ends with its manifest. It is written under a hidden name, made
    durable, and renamed, so it is either complete or missing. A file `<name>.pinned` (`touch` it) exempts it from
    removal. The shards of several ranks are in a folder that its manifest names. `<run>.last` and `<run>.best` each
    hold a file name, for people and tools.

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
        self._lock = Lock(self._hidden.lock, f"The checkpoints of run {run_name!r} in {folder} are written")
        self._sequence: int | None = None  # the highest so far, while the store is open
        self._date = 0  # of the latest file

    def open(self, patience: float = 0.0) -> list[str]:
        """Acquire the lock and remove the temporary files of an interrupted writer; return notes about them.

        Args:
            patience: seconds to wait for another process to release the lock.

        Raises:
            ValueError: another process writes this run's checkpoints there (it is named), or nothing can be written.
            OSError: the files of an interrupted save cannot be removed.
        """
        prepare_folder(self.folder)
        notes = []
        try:
            if not self._lock.acquire(patience):
                notes.append(f"{self.folder} has no file locks: a second process can write this run at the same time.")
            with self._manifests.steady():
                files = self._manifests.recent(self.run_name)
                self._date = max(max(stamp[2:3], default=0) for stamp in [(), *self._manifests.names().values()])
            notes += self._sweep()
            for shards_name in {
                file.entry.former_shards for file in files if file.entry and file.run_name == self.run_name
            }:
                self._remove_shards(shards_name)
            self._sequence = inventory.highest_sequence(files, self.run_name)
            return notes + inventory.unreadable_notes(files)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, OSError):
                path = error.filename or "a file in it"
                reason = f"{path} cannot be read or changed: {error.strerror or error}. Nothing was started"
                text = f"The folder of checkpoints {self.folder} cannot be prepared: {reason}: choose another folder."
                raise OSError(error.errno, text) from error
            raise

    def close(self) -> None:
        """Release the lock; closing twice does nothing."""
        self._sequence = None
        self.name = self.run_name
        self._lock.release()

    def write_as(self, training_id: str, name: str) -> None:
        """Write the checkpoints of this training from now on, under this name."""
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

        A checkpoint of this training with the same name is replaced. If the name belongs to another file (a pinned or
        renamed checkpoint, one of another training, a file without a valid manifest), a number is added: use the
        entry's path.

        Args:
            name: the file name, which ends in `.pth`.
            state: plain types and tensors.
            judged_by: metric, mode and value that rank it for `keep_best`.
            sequence: its number in the order of writing, for checkpoints of Helios; by default the next.
            shards: size and digest, by name, of the files in the folder that `begin_shards` returned.
            replace_unknown: replace a file without a valid manifest, too.
            read_back: read the data again before the file gets its name.

        Raises:
            OSError: for example the disk is full, the folder is read-only, or the data read back differs; the message
                names the file and the free space. All previous checkpoints are unchanged, unless the last sync failed
                after a file was replaced: then the new file, which is complete, keeps its name.
            ValueError: the name is not valid, the state is of another training, or its manifest would be too long.
        """
        newest = self._highest(state["run_name"])
        training = state["training_id"]
        if training != (self.training_id or training):
            raise ValueError(f"A state of training {training} was given to the store of {self.training_id}.")
        path, replaces, replaced = self._free_path(self.folder / check_name(name), training, replace_unknown)
        entry = self._entry(path, state, newest + 1 if sequence is None else sequence, judged_by)
        entry = replace(entry, former_shards=replaced.shards[0] if replaced and replaced.shards else "")
        files, hidden, consequence = self._files, self._hidden, UNTOUCHED
        try:
            if not shards:  # `begin_shards` has removed what a failed change left
                self._sweep()
            state, needed = compacted(state)
            _check_room(files, self.folder, needed, "it")
            try:
                if shards:
                    folder, digests = f"{path.stem}.{token_hex(4)}.shards", json.dumps(shards, indent=1).encode()
                    write_small(files, hidden.shards / manifest.DIGESTS, digests)
                    entry = replace(entry, shards=(folder, sha256(digests).hexdigest()))
                    state = {**state, "shards": {**state.get("shards", {}), "folder": folder}}
                entry = write_checkpoint(files, hidden.data, state, entry, self._next_date(), read_back=read_back)
                self._put_in_place(entry)
            except BaseException as error:
                if not self._undo(entry, replaces, error):
                    self._sequence, consequence = max(newest, entry.sequence), MAY_BE_LOST
                raise
        except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
            raise _failure(files, path, error, consequence) from error
        if entry.former_shards:
            with suppress(OSError):  # the save is complete; the next start removes them
                self._remove_shards(entry.former_shards)
        self._sequence = max(newest, entry.sequence)
        return entry

    def begin_shards(self, needed: int) -> Path:
        """Return an empty folder for the shards of the next `save`, which renames it.

        Args:
            needed: bytes of all shards.

        Raises:
            OSError: there is not enough space, or the folder could not be created.
        """
        self._sweep()
        _check_room(self._files, self.folder, needed, f"writing the shards of a checkpoint in {self.folder}")
        self._hidden.shards.mkdir()
        return self._hidden.shards

    def take_in(self, path: Path) -> Entry:
        """Move a complete checkpoint here from another folder of the same file system; return its entry.

        Its training and its sequence do not change. If its name is taken, a number is added, also in its manifest.

        Raises:
            OSError: it could not be moved.
            ValueError: it has no manifest, or is of another run.
        """
        entry = inventory.read_manifest(path, files=self._files)
        newest = self._highest(entry.family)
        free, _, replaced = self._free_path(self.folder / path.name, entry.training, replace_unknown=False)
        if not entry.is_renamed:  # a name that differs from its manifest would make it count as renamed
            entry = replace(entry, name=free.name)
        self._sweep()
        rewrite_manifest(self._files, path, self._hidden.data, entry, self._next_date())
        if entry.shards:  # if the process is killed after this, the next start removes them
            self._files.rename(path.with_name(entry.shards[0]), self.folder / entry.shards[0])
        self._files.rename(self._hidden.data, free)
        self._files.sync_folder(self.folder)
        self._files.unlink(path)
        if replaced and replaced.shards:
            self._remove_shards(replaced.shards[0])
        self._sequence = max(newest, entry.sequence)
        return replace(entry, path=free)

    def judge(self, entry: Entry, judged_by: JudgedBy) -> Entry:
        """Write the metric that ranks a checkpoint into its manifest, and return when that is durable.

        A new file replaces it by a rename, so hard links to it, for example in a backup, do not change.

        Raises:
            OSError: it could not be written, or there is no space for a second file; the checkpoint is unchanged.
        """
        entry, files, hidden = replace(entry, judged_by=judged_by), self._files, self._hidden
        try:
            _check_room(files, self.folder, entry.size + manifest.MOST, "writing its metric")
            rewrite_manifest(files, entry.path, hidden.data, entry, self._next_date())
            files.rename(hidden.data, entry.path)
            files.sync_folder(self.folder)
        except OSError as error:
            raise _failure(files, entry.path, error) from error
        return entry

    def steady(self) -> AbstractContextManager[None]:
        """Read the folder once and use the result within the context."""
        return self._manifests.steady()

    def entries(self, scope: inventory.Scope = "run") -> tuple[list[Entry], list[str]]:
        """Return the checkpoints of all trainings of the run's name, newest first, and notes on skipped files.

        `scope` selects which manifests are read; see `inventory.entries`.
        """
        return inventory.entries(self._manifests, self.run_name, scope)

    def own(self, scope: inventory.Scope = "run") -> list[Entry]:
        """Return the training's checkpoints, newest first; see `entries`."""
        return [entry for entry in self.entries(scope)[0] if entry.training == (self.training_id or entry.training)]

    def under(self, name: str) -> tuple[list[Entry], list[FoundFile], int]:
        """Return checkpoints by the name of their files, other files of that name, and the number of both.

        Only the newest ones are returned, if one of them has the name.
        """
        return inventory.under(self._manifests, self.run_name, name)

    def lost(self, scope: inventory.Scope = "run") -> list[FoundFile]:
        """Return damaged files that were checkpoints of this run's name, according to their beginning."""
        return inventory.lost(self._manifests, self.run_name, scope)

    def newest(self) -> tuple[Entry | None, State | None, list[str]]:
        """Return the newest intact checkpoint, its state, and a message for each skipped one."""
        from . import reader  # imported when data are read

        return reader.newest(self._manifests, self.run_name)

    def load(self, path: Path) -> State:
        """Return the state in a checkpoint in any folder, verified; see `reader.load`."""
        from . import reader  # imported when data are read

        return reader.load(path, files=self._files)

    def verify(self, path: Path) -> Entry:
        """Verify every byte of a checkpoint in any folder; see `reader.verify`."""
        from . import reader  # imported when data are read

        return reader.verify(path, files=self._files)

    def files_of(self, path: Path) -> list[Path]:
        """Return the files of a checkpoint in any folder: the file itself, and those in its folder of shards.

        Raises:
            ValueError: it has no manifest, or a shard is missing or has another size.
        """
        from . import reader  # imported when data are read

        entry = inventory.read_manifest(path, files=self._files)
        for shard, (size, _) in reader.read_shards(entry, files=self._files).items():
            if not shard.is_file() or shard.stat().st_size != size:
                raise ValueError(f"The checkpoint {path} is damaged: {shard} is missing, or has another size.")
        return [path] if entry.shards is None else [path, *sorted(reader.shards_path(entry).iterdir())]

    def peek(self, path: Path) -> State:
        """Return the state in a checkpoint in any folder, unverified, with its tensors left on the disk."""
        from . import reader  # imported when data are read

        return reader.read(path, map_tensors=True, files=self._files)  # type: ignore[no-any-return]

    def marks(self, entry: Entry) -> list[str]:
        """Return which of `last`, `best` and `pinned` apply to a checkpoint in any folder."""
        path, labels = entry.path, get_args(Label)
        pointers = {label: read_pointer(pointer_path(path.parent, entry.run_name, label)) for label in labels}
        return [label for label in labels if pointers[label] == path.name] + ["pinned"] * self.is_pinned(path)

    def scratch(self, kind: str) -> Path:
        """Return the path of a hidden folder beside the checkpoints, for other files of this run."""
        return self._hidden.lock.with_suffix(f".{kind}")

    def remove(self, path: Path, training: str | None = None) -> bool:
        """Remove a checkpoint of the training; return whether it was removed.

        A pinned or renamed checkpoint, one of Helios, and a file without a valid manifest are not removed.

        Args:
            path: the checkpoint.
            training: the id of another training, to remove one of its checkpoints.

        Raises:
            OSError: it could not be removed.
        """
        if self.is_pinned(path):
            return False
        try:
            entry = inventory.read_manifest(path, files=self._files)
        except (ValueError, FileNotFoundError):  # its training is unknown, or it was just moved away
            return False
        if entry.training != (training or self.training_id or entry.training) or not entry.is_removable:
            return False
        if entry.shards:  # its manifest, under the hidden name, lists the shards to remove
            self._files.rename(path, self._hidden.data)
            self._sweep()
        else:
            self._files.unlink(path)
        return True

    def pin(self, path: Path) -> None:
        """Exempt a checkpoint from removal."""
        path.with_suffix(manifest.PINNED).touch()

    def is_pinned(self, path: Path) -> bool:
        """Return whether a checkpoint is pinned."""
        return self._files.exists(path.with_suffix(manifest.PINNED))

    def point(self, label: Label, path: Path | None) -> None:
        """Write the pointer to the last or best checkpoint, for people and tools; None removes it.

        After a power cut, the pointer to the last may be empty or truncated until a resume of the training writes it
        again.

        Raises:
            OSError: it could not be written.
        """
        pointer, name = pointer_path(self.folder, self.name, label), None if path is None else path.name
        if name is None:
            self._files.unlink(pointer)
        elif read_pointer(pointer) != name:
            # `prune` spares the best. The pointer to the last is only a hint, so it is not synced.
            write_small(self._files, self._hidden.small, f"{name}\n".encode(), syncs=label == "best")
            self._files.rename(self._hidden.small, pointer)

    def _sweep(self) -> list[str]:
        hidden, files = self._hidden, self._files
        leftovers = [path for path in (hidden.data, hidden.small, hidden.shards) if files.exists(path)]
        if hidden.data in leftovers:
            with suppress(ValueError, FileNotFoundError):  # it was not complete, or is a broken link
                if shards := inventory.read_manifest(hidden.data, files=files).shards:
                    self._remove_shards(shards[0])
        for path in leftovers:
            files.remove_folder(path) if path == hidden.shards else files.unlink(path)
        names = ", ".join(path.name for path in leftovers)
        return [f"Removed files of an interrupted save: {names}."] if names else []

    def _remove_shards(self, name: str) -> None:
        # unless a checkpoint in the folder names it, or an unreadable one may
        folder = self.folder / name
        if name and self._files.exists(folder):
            files = self._manifests.look(again=True)
            is_unsure = any(isinstance(file.problem, (OSError, SchemaError)) for file in files)
            if not is_unsure and not any(file.entry and (file.entry.shards or ("",))[0] == name for file in files):
                self._files.remove_folder(folder)

    def _put_in_place(self, entry: Entry) -> None:
        # the last rename is the commit
        files, hidden, path = self._files, self._hidden, entry.path
        if entry.shards:
            files.sync_folder(hidden.shards)
            files.sync_folder(self.folder)  # the hidden manifest lists the shards, if the rename below does not happen
            files.rename(hidden.shards, self.folder / entry.shards[0])
        files.rename(hidden.data, path)
        files.sync_folder(self.folder)

    def _undo(self, entry: Entry, replaces: bool, error: BaseException) -> bool:
        # By the files that exist: an interrupt may come between any two steps. False if the new file stays, because it
        # has replaced one.
        files, stays = self._files, replaces
        try:
            is_renamed = not files.exists(self._hidden.data) and self._is_at(entry)
            stays = replaces and is_renamed
            if stays:
                return False
            if is_renamed:
                files.unlink(entry.path)
            if entry.shards:
                files.remove_folder(self.folder / entry.shards[0])
            self._sweep()
        except OSError as second:
            error.add_note(f"Undoing the save failed, too; the next save or start retries it: {second}")
        return not stays

    def _is_at(self, entry: Entry) -> bool:
        with suppress(ValueError, OSError):
            return inventory.read_manifest(entry.path, files=self._files).sha256 == entry.sha256
        return False

    def _highest(self, run_name: str) -> int:
        if self._sequence is None:
            raise ValueError(f"The store of {self.folder} is not open: call open() before save().")
        if run_name != self.run_name:
            raise ValueError(f"A state of run {run_name!r} was given to the store of {self.run_name!r}.")
        return self._sequence

    def _next_date(self) -> int:
        # later than all before, even if the clock was set back; see `Manifests.recent`
        self._date = max(self._date + 1, time_ns())
        return self._date

    def _entry(self, path: Path, state: Mapping[str, Any], sequence: int, judged_by: JudgedBy | None) -> Entry:
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
            name=path.name,
        )

    # Returns a path that the training may write, whether a file is there, and its entry.
    def _free_path(self, wanted: Path, training: str, replace_unknown: bool) -> tuple[Path, bool, Entry | None]:
        path, number = wanted, 1
        while True:
            if not self._files.exists(path) and not self.is_pinned(path):
                return path, False, None
            with suppress(OSError):  # its training is unknown
                try:
                    present: Entry | None = inventory.read_manifest(path, files=self._files)
                except ValueError:
                    present = None
                is_own = present and present.training == training and (replace_unknown or present.is_removable)
                if (is_own if present else replace_unknown) and not self.is_pinned(path):
                    return path, True, present
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{manifest.SUFFIX}")


def _check_room(files: Files, folder: Path, needed: int, action: str) -> None:
    if needed > (free := files.free(folder)):
        size, room = megabytes(needed, needed=True), f"{megabytes(free)} are free"
        raise OSError(
            errno.ENOSPC,
            f"{action} needs {size} and was not started ({room}): keep fewer checkpoints or free some space",
        )


def _failure(files: Files, path: Path, error: Exception, consequence: str = UNTOUCHED) -> OSError:
    try:
        room = f"{megabytes(files.free(path.parent))} are free in its folder"
    except FileNotFoundError:
        room, consequence = "its folder is missing", ""
    except OSError as second:
        room = f"the free space in its folder is unknown: {second}"
    failure = OSError(f"The checkpoint {path} could not be written ({room}): {error}. {consequence}".rstrip())
    failure.errno = getattr(error, "errno", None)
    return failure
