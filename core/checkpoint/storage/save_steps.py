"""The steps of a save: write data and manifest to hidden files, sync, rename; undone if one of them fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from ..state.schema import MAPPINGS, SEQUENCES
from .files import Files, HashingWriter
from .manifest import Entry, Hidden, encode, manifest_path, shards_path
from .recovery import sweep

Moves = list[tuple[Path, Path]]


def write(files: Files, hidden: Hidden, entry: Entry, state: Mapping[str, Any], *, read_back: bool) -> Entry:
    """Write the data and the manifest of an entry, or leave everything as it was.

    Args:
        files: the operations on files.
        hidden: the hidden files of the run.
        entry: the entry, with its path; size and digest are not known yet.
        state: plain types and tensors.
        read_back: read the data again before it gets its name.

    Returns:
        The entry, with the size and the digest of what was written.

    Raises:
        OSError: there is not enough space, or a step failed; the message names the file and the free space.
    """
    path = entry.path
    try:
        if not entry.shards:  # else it was done before the shards were written
            sweep(files, path.parent, entry.family)  # a failed save that could not be undone may have left files
        state = compact(state)
        _check_space(files, path.parent, state)
        moves: Moves = []
        try:
            entry = _write_aside(files, hidden, entry, state, read_back=read_back)
            moves += _moves(files, hidden, entry)
            _put_in_place(files, path.parent, moves)
        except BaseException as error:
            _undo(files, hidden, moves, error)
            raise
    except (OSError, RuntimeError) as error:  # torch reports some failed writes as a RuntimeError
        raise _failure(files, path, error) from error
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
        moves += _moves(files, hidden, entry)
        _put_in_place(files, entry.path.parent, moves)
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


def write_small(files: Files, path: Path, content: bytes) -> None:
    """Write a small file and make its content durable.

    Raises:
        OSError: a step failed, or the content read back differs.
    """
    with files.create(path) as file:
        files.write(file, content)
        files.sync(file)
    if files.read(path, len(content)) != content:
        raise OSError(errno.EIO, f"what was read back of {path} is not what was written")


def _check_space(files: Files, folder: Path, state: Mapping[str, Any]) -> None:
    needed = estimate(state)
    if needed > files.free(folder):
        raise OSError(errno.ENOSPC, f"it needs {needed / 1e6:.1f} MB and was not begun, keep fewer or free some space")


def _write_aside(files: Files, hidden: Hidden, entry: Entry, state: Mapping[str, Any], *, read_back: bool) -> Entry:
    """Write both files under hidden names, and make their content durable."""
    with files.create(hidden.data) as file:
        writer = HashingWriter(files, file)
        try:
            torch.save(dict(state), cast(IO[bytes], writer))  # it only calls write and flush
        except BaseException:
            if writer.failure is not None:
                raise writer.failure from None  # torch replaces the error of a failed write, and hides Ctrl-C
            raise
        files.sync(file)
    if read_back and files.digest(hidden.data) != (writer.size, writer.sha256()):
        raise OSError(errno.EIO, "what was read back is not what was written: the disk or the memory is faulty")
    entry = replace(entry, size=writer.size, sha256=writer.sha256())
    write_small(files, hidden.manifest, encode(entry))
    return entry


def _moves(files: Files, hidden: Hidden, entry: Entry) -> Moves:
    """Return the renames, the manifest last; files that have the names now are moved aside first, to be restored."""
    path, manifest, shards = entry.path, manifest_path(entry.path), shards_path(entry.path)
    former = [(manifest, hidden.former_manifest), (path, hidden.former_data), (shards, hidden.former_shards)]
    new = [(hidden.shards, shards), (hidden.data, path), (hidden.manifest, manifest)]
    return [*(each for each in former if files.exists(each[0])), *(new if entry.shards else new[1:])]


def _put_in_place(files: Files, folder: Path, moves: Moves) -> None:
    if len(moves) > 2:  # something is replaced: the hidden names must survive a power cut
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
        free = files.free(path.parent) if path.parent.exists() else 0
        room = f"{free / 1e6:.1f} MB are free in its folder"
    except OSError as second:
        room = f"how much is free in its folder cannot be read: {second}"
    failure = OSError(
        f"The checkpoint {path} could not be written ({room}): {error}. Former checkpoints are untouched."
    )
    failure.errno = getattr(error, "errno", None)
    return failure


View = tuple[Any, ...]


def compact(state: Any) -> Any:
    """Return a state whose tensors have no larger storage than they need.

    A tensor is copied if its storage is larger than all views of it in the state, as of a slice, or if tensors of
    another dtype view the same memory, which torch cannot save. All others are returned as they are and still share
    memory; so do copies of the same slice.
    """
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: two storages may have the same memory, as of NumPy's arrays
    addresses: dict[int, int] = {}
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        sizes[storage._cdata], addresses[storage._cdata] = storage.nbytes(), storage.data_ptr()
        dtypes.setdefault(storage.data_ptr(), set()).add(tensor.dtype)
        views.setdefault(storage._cdata, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    loose |= {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}
    return _rebuilt(state, loose, {}) if loose else state


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) in MAPPINGS:
        value = list(value.values())
    if type(value) in SEQUENCES:
        for item in value:
            yield from _tensors(item)
    elif _has_memory(value):
        yield value


def _has_memory(value: Any) -> bool:
    """Return whether a value is a dense tensor with a storage: not sparse, quantized, meta or nested."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer


PER_TENSOR = 512  # a record's header, its padding, its entry in the directory


PER_VALUE = 16


def estimate(state: Any) -> int:
    """Return about how many bytes a state needs on disk; shared storages count once."""
    storages: dict[int, int] = {}
    return SLACK + _values(state, storages) + sum(storages.values())


def _values(value: Any, storages: dict[int, int]) -> int:
    if isinstance(value, Tensor):
        return PER_TENSOR + _tensor(value, storages)
    if isinstance(value, Mapping):
        return sum(_values(key, storages) + _values(item, storages) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_values(item, storages) for item in value)
    return PER_VALUE + (len(value) if isinstance(value, str | bytes) else 0)


def _tensor(tensor: Tensor, storages: dict[int, int]) -> int:
    """Return the bytes of a tensor without a storage; of others, add the storage, which is saved once, as a whole."""
    if tensor.layout is not torch.strided:
        return tensor.element_size() * tensor.numel()
    storage = tensor.untyped_storage()
    storages[storage._cdata] = storage.nbytes()
    return 0
