"""The steps of a save: write data and manifest to hidden files, sync, rename; undone if one of them fails."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from ....events.checks import PLAIN
from ..state.schema import CONTAINERS, MAPPINGS, SEQUENCES
from .files import Files, HashingWriter, megabytes
from .manifest import Entry, Hidden, encode, manifest_path, shards_path
from .recovery import sweep

Moves = list[tuple[Path, Path]]
NO_STORAGES = PLAIN | frozenset(CONTAINERS)
View = tuple[Any, ...]
SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer
PER_TENSOR = 512  # a record's header, its padding, its entry in the directory
PER_VALUE = 16
TEXTS = frozenset({str, bytes})
NUMBERS = PLAIN - TEXTS


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


def compacted(state: Any) -> tuple[Any, int]:
    """Return a state whose tensors have no larger storage than they need, and about how many bytes it needs on disk.

    A tensor is copied if its storage is larger than all views of it in the state, as of a slice, or if tensors of
    another dtype view the same memory, which torch cannot save. All others are returned as they are and still share
    memory; so do copies of the same slice.
    """
    tensors, rest = _contents(state)
    if loose := _loose(tensors):
        state = _rebuilt(state, loose, {})
        tensors, rest = _contents(state)
    return state, SLACK + rest + PER_TENSOR * len(tensors) + _bytes(tensors)


def _contents(state: Any) -> tuple[list[Tensor], int]:
    """Return the tensors of a state, and about how many bytes the rest needs."""
    tensors, size, level = list[Tensor](), 0, [state]
    while level:
        keys, items = list[Any](), list[Any]()
        for each in level:
            if type(each) in MAPPINGS:
                keys += each
                items += each.values()
            elif type(each) in SEQUENCES:
                size += PER_VALUE * len(each)
                items += [item for item in each if type(item) not in NUMBERS]  # lists of a thousand are common
            elif isinstance(each, Tensor):
                tensors.append(each)
        size += PER_VALUE * len(keys) + sum([len(each) for each in chain(keys, items) if type(each) in TEXTS])
        level = [item for item in items if type(item) not in PLAIN]
    return tensors, size


def _bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors; a storage is saved once, as a whole."""
    storages, size = dict[int, int](), 0
    for each in tensors:
        if each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            size += each.element_size() * each.numel()
    return size + sum(storages.values())


def _loose(tensors: list[Tensor]) -> set[int]:
    """Return the storages that are larger than what is shown of them, or shown as several dtypes."""
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: two storages may have the same memory, as of NumPy's arrays
    addresses: dict[int, int] = {}
    for tensor in filter(_has_memory, tensors):
        storage = tensor.untyped_storage()
        number, address = storage._cdata, storage.data_ptr()
        sizes[number], addresses[number] = storage.nbytes(), address
        dtypes.setdefault(address, set()).add(tensor.dtype)
        views.setdefault(number, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    return loose | {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}


def _rebuilt(value: Any, loose: set[int], made: dict[View, Tensor]) -> Any:
    if type(value) in MAPPINGS:
        return type(value)({key: _rebuilt(item, loose, made) for key, item in value.items()})
    if type(value) in SEQUENCES:
        return type(value)([_rebuilt(item, loose, made) for item in value])
    if not _has_memory(value) or value.untyped_storage()._cdata not in loose:
        return value
    view = (value.untyped_storage()._cdata, *_view(value))
    if view not in made:
        made[view] = value.detach().clone(memory_format=torch.contiguous_format)
    form = (*view, type(value), value.requires_grad)  # a frozen view of a trained tensor is a tensor of its own
    if form not in made:
        copy = made[view].detach()
        copy = nn.Parameter(copy, requires_grad=False) if type(value) is nn.Parameter else copy
        made[form] = copy.requires_grad_(value.requires_grad)
    return made[form]


def _has_memory(value: Any) -> bool:
    """Return whether a value is a dense tensor with a storage: not sparse, quantized, meta or nested."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
