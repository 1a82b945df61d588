"""The steps of a save: write data and manifest to hidden files, sync, rename; undone if one of them fails."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch

from ....events.checks import PLAIN
from ..state.schema import CONTAINERS
from .contents import compacted
from .files import Files, HashingWriter, megabytes
from .manifest import Entry, Hidden, encode, manifest_path, shards_path
from .recovery import sweep

Moves = list[tuple[Path, Path]]
NO_STORAGES = PLAIN | frozenset(CONTAINERS)


def write(
    files: Files, hidden: Hidden, entry: Entry, state: Mapping[str, Any], *, read_back: bool, is_clear: bool = False
) -> Entry:
    """Write the data and the manifest of an entry, or leave everything as it was.

    Args:
        files: the operations on files.
        hidden: the hidden files of the run.
        entry: the entry, with its path; size and digest are not known yet.
        state: plain types and tensors.
        read_back: read the data again before it gets its name.
        is_clear: whether nothing has the names of its files, and no failed save can have left any.

    Returns:
        The entry, with the size and the digest of what was written.

    Raises:
        OSError: there is not enough space, or a step failed; the message names the file and the free space.
    """
    path = entry.path
    try:
        if not (entry.shards or is_clear):  # with shards it was done before these were written
            sweep(files, path.parent, entry.family)
        state, needed = compacted(state)
        _check_space(files, path.parent, needed)
        moves: Moves = []
        try:
            entry = _write_aside(files, hidden, entry, state, read_back=read_back)
            aside = [] if is_clear else _moves_aside(files, hidden, path)
            moves += [*aside, *_moves_into_place(hidden, entry)]
            _put_in_place(files, path.parent, moves, replaces=bool(aside))
        except BaseException as error:
            _undo(files, hidden, moves, error)
            raise
    except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
        raise _failure(files, path, error) from error
    if aside:
        with suppress(OSError):  # the save is complete; the next one removes what is left, or raises
            files.unlink(hidden.former_data)
            files.remove_folder(hidden.former_shards)
            files.unlink(hidden.former_manifest)
    return entry


def take_in(files: Files, hidden: Hidden, entry: Entry, source: Path) -> None:
    """Move a complete checkpoint from another folder of the same file system to the path of an entry.

    Raises:
        OSError: a step failed; all former checkpoints are as they were.
    """
    sweep(files, entry.path.parent, entry.family)
    moves: Moves = []
    try:
        write_small(files, hidden.manifest, encode(entry))
        if entry.shards:
            files.rename(shards_path(source), hidden.shards)
        files.rename(source, hidden.data)
        aside = _moves_aside(files, hidden, entry.path)
        moves += [*aside, *_moves_into_place(hidden, entry)]
        _put_in_place(files, entry.path.parent, moves, replaces=bool(aside))
    except BaseException as error:
        _undo(files, hidden, moves, error)
        raise
    sweep(files, entry.path.parent, entry.family)  # what was replaced


def write_manifest(files: Files, hidden: Hidden, entry: Entry) -> Entry:
    """Write a manifest for an existing data file.

    Returns:
        The entry, with the size and the digest of the data.

    Raises:
        OSError: a step failed.
    """
    size, sha256 = files.digest(entry.path)
    entry = replace(entry, size=size, sha256=sha256)
    put_manifest(files, hidden, entry)
    return entry


def put_manifest(files: Files, hidden: Hidden, entry: Entry) -> None:
    """Write the manifest of a checkpoint in one step, in place of one that is there.

    Raises:
        OSError: a step failed.
    """
    write_small(files, hidden.manifest, encode(entry))
    files.rename(hidden.manifest, manifest_path(entry.path))
    files.sync_folder(entry.path.parent)


def write_state(files: Files, path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    """Write a state and make it durable; return its size and its digest.

    Raises:
        OSError: a step failed.
    """
    with files.create(path) as file:
        written = _fill(files, file, state)
        files.sync(file)
    return written


def _fill(files: Files, file: FileIO, state: Mapping[str, Any]) -> tuple[int, str]:
    """Write a state; return its size and its digest."""
    writer = HashingWriter(files, file)
    try:
        torch.save(dict(state), cast(IO[bytes], writer), pickle_module=Pickle)  # it only calls write and flush
    except BaseException:
        if writer.failure is not None:
            raise writer.failure from None  # torch replaces the error of a failed write, and hides Ctrl-C
        raise
    return writer.size, writer.finish()


class Pickle:
    """What `torch.save` uses as the module `pickle`: a state holds hundreds of plain values, and torch asks of each."""

    class Pickler(pickle.Pickler):
        """Asks its subclass, which torch makes at each save, only of what may be the storage of a tensor."""

        def __init_subclass__(cls) -> None:
            ask: Callable[[Any, Any], Any] = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                return None if type(value) in NO_STORAGES else ask(self, value)

            cls.persistent_id = persistent_id  # type: ignore[method-assign]  # the same signature


def write_small(files: Files, path: Path, content: bytes, *, syncs: bool = True) -> None:
    """Write a small file and, with `syncs`, make its content durable.

    Raises:
        OSError: a step failed, or the content read back differs.
    """
    with files.create(path) as file:
        files.write(file, content)
        if syncs:
            files.sync(file)
    _check_written(files, path, content)


def _check_written(files: Files, path: Path, content: bytes) -> None:
    if files.read(path, len(content)) != content:
        raise OSError(errno.EIO, f"what was read back of {path} is not what was written")


def _check_space(files: Files, folder: Path, needed: int) -> None:
    if needed > files.free(folder):
        raise OSError(
            errno.ENOSPC, f"it needs {megabytes(needed, needed=True)} and was not begun, keep fewer or free some space"
        )


def _write_aside(files: Files, hidden: Hidden, entry: Entry, state: Mapping[str, Any], *, read_back: bool) -> Entry:
    """Write both files under hidden names, and make their content durable."""
    with files.create(hidden.data) as data, files.create(hidden.manifest) as manifest:
        written = _fill(files, data, state)
        entry = replace(entry, size=written[0], sha256=written[1])
        files.write(manifest, content := encode(entry))
        files.begin_sync(manifest)
        files.sync(data)
        files.sync(manifest)
    if read_back and files.digest(hidden.data) != written:
        raise OSError(errno.EIO, "what was read back is not what was written: the disk or the memory is faulty")
    _check_written(files, hidden.manifest, content)
    return entry


def _moves_aside(files: Files, hidden: Hidden, path: Path) -> Moves:
    """Return the renames of the files that have the names now, to be restored if the save fails."""
    manifest, shards = manifest_path(path), shards_path(path)
    former = [(manifest, hidden.former_manifest), (path, hidden.former_data), (shards, hidden.former_shards)]
    return [each for each in former if files.exists(each[0])]


def _moves_into_place(hidden: Hidden, entry: Entry) -> Moves:
    """Return the renames of what was written, the manifest last."""
    new = [(hidden.data, entry.path), (hidden.manifest, manifest_path(entry.path))]
    return [(hidden.shards, shards_path(entry.path)), *new] if entry.shards else new


def _put_in_place(files: Files, folder: Path, moves: Moves, *, replaces: bool) -> None:
    if replaces:  # the hidden names must survive a power cut
        files.sync_folder(folder)
    for old, new in moves:
        files.rename(old, new)
    files.sync_folder(folder)


def _undo(files: Files, hidden: Hidden, moves: Moves, error: BaseException) -> None:
    """Undo a save, by the files that exist: an interrupt may come between any two steps."""
    try:
        for old, new in reversed(moves):
            if not files.exists(old):
                files.rename(new, old)
        files.unlink(hidden.data)
        files.remove_folder(hidden.shards)
        files.unlink(hidden.manifest)
    except OSError as second:
        error.add_note(f"Undoing the save failed too, the next save or start will see to it: {second}")


def _failure(files: Files, path: Path, error: Exception) -> OSError:
    try:
        is_there = path.parent.exists()
        room = f"{megabytes(files.free(path.parent))} are free in its folder" if is_there else "its folder is gone"
    except OSError as second:
        is_there, room = True, f"how much is free in its folder cannot be read: {second}"
    rest = " Former checkpoints are untouched." * is_there
    failure = OSError(f"The checkpoint {path} could not be written ({room}): {error}.{rest}")
    failure.errno = getattr(error, "errno", None)
    return failure
