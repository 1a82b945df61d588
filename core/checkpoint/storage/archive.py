"""Write a checkpoint as one file: torch's archive, with the manifest as the archive's comment at the end.

The last two bytes of a zip archive before its comment are the length of the comment. The digest in the manifest covers
all bytes before these two, except the content of large records. The archive's directory holds the CRC-32 of these
records, and the digest covers the directory. The manifest has its own digest, and its length must match the file: so
every byte is verified. Torch reads such a file like any other.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.serialization import get_crc32_options, set_crc32_options

from ....events.checks import PLAIN
from ..schema import CONTAINERS, MAPPINGS, map_leaves
from .files import PIECE, ArchiveWriter, Files
from .manifest import Entry, encode

View = tuple[Any, ...]
SLACK = 64 * 1024  # plain values, the archive's directory, the manifest, a pointer
PER_TENSOR = 512  # a record's header, its padding, its entry in the directory


def compacted(state: Any) -> tuple[Any, int]:
    """Return a state whose tensors have no larger storage than they need, and about how many bytes it needs on disk.

    A tensor is copied if its storage is larger than all views of it in the state, for example for a slice, or if
    tensors of another dtype view the same memory, which torch cannot save. All others are returned unchanged and still
    share memory; so do copies of the same slice.
    """
    tensors = list(tensors_in(state))
    if oversized := _oversized_storages(tensors):
        state = map_leaves(state, partial(_with_compact_storage, oversized=oversized, made={}))
        tensors = list(tensors_in(state))
    return state, SLACK + PER_TENSOR * len(tensors) + _bytes(tensors)


def _bytes(tensors: list[Tensor]) -> int:
    storages, size = dict[int, int](), 0
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
        else:
            size += tensor.element_size() * tensor.numel()
    return size + sum(storages.values())


def _oversized_storages(tensors: list[Tensor]) -> set[int]:
    # also storages that are viewed with several dtypes
    views: dict[int, dict[View, int]] = {}
    sizes: dict[int, int] = {}
    dtypes: dict[int, set[torch.dtype]] = {}  # by address: storages of NumPy arrays may share memory
    addresses: dict[int, int] = {}
    for tensor in filter(has_memory, tensors):
        storage = tensor.untyped_storage()
        number, address = storage._cdata, storage.data_ptr()
        sizes[number], addresses[number] = storage.nbytes(), address
        dtypes.setdefault(address, set()).add(tensor.dtype)
        views.setdefault(number, {})[_view(tensor)] = tensor.nbytes
    loose = {number for number, size in sizes.items() if size > sum(views[number].values())}
    return loose | {number for number, address in addresses.items() if address and len(dtypes[address]) > 1}


def _with_compact_storage(tensor: Any, oversized: set[int], made: dict[View, Tensor]) -> Any:
    if not has_memory(tensor) or tensor.untyped_storage()._cdata not in oversized:
        return tensor
    view = (tensor.untyped_storage()._cdata, *_view(tensor))
    if view not in made:
        made[view] = tensor.detach().clone(memory_format=torch.contiguous_format)
    form = (*view, type(tensor), tensor.requires_grad)  # a frozen view of a trained tensor stays separate
    if form not in made:
        copy = made[view].detach()
        copy = nn.Parameter(copy, requires_grad=False) if type(tensor) is nn.Parameter else copy
        made[form] = copy.requires_grad_(tensor.requires_grad)
    return made[form]


def tensors_in(value: Any) -> Iterator[Tensor]:
    # a shared container is visited once
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif type(value) in CONTAINERS and id(value) not in seen:
            seen.add(id(value))
            items = value.values() if type(value) in MAPPINGS else value
            pending += [item for item in items if type(item) not in PLAIN]  # lists of a thousand are common


def has_memory(value: Any) -> bool:
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )


def _view(tensor: Tensor) -> View:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def write_checkpoint(
    files: Files, path: Path, state: Mapping[str, Any], entry: Entry, date: int, *, read_back: bool
) -> Entry:
    with files.create(path) as file, _writing(files, file, state) as writer:
        entry = replace(entry, size=writer.size, sha256=writer.digest())
        writer.end(encode(entry))
        if (read_back or writer.leaves_out) and not _has_digest(files, path, entry, checks_data=read_back):
            raise OSError(
                errno.EIO, f"{path}: the data read back differs from the data written; the disk or the memory is faulty"
            )
        files.date(file, date)
        files.sync(file)
    return entry


def rewrite_manifest(files: Files, path: Path, target: Path, entry: Entry, date: int) -> None:
    with files.try_open(path) as source, files.create(target) as file:
        remaining = entry.size - 2
        while remaining and (piece := source.read(min(remaining, PIECE))):
            files.write(file, piece)
            remaining -= len(piece)
        manifest = encode(entry)
        files.write(file, len(manifest).to_bytes(2, "little") + manifest)
        if not _has_digest(files, target, entry):
            raise OSError(errno.EIO, f"{path} is damaged: its content does not match its manifest")
        files.date(file, date)
        files.sync(file)


def _has_digest(files: Files, path: Path, entry: Entry, *, checks_data: bool = True) -> bool:
    with suppress(ValueError):
        return files.archive_digest(path, entry.size, checks_data=checks_data) == entry.sha256
    return False


def write_state(files: Files, path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    with files.create(path) as file, _writing(files, file, state) as writer:
        writer.finish()
        files.sync(file)
    return files.digest(path)


@contextmanager
def _writing(files: Files, file: FileIO, state: Mapping[str, Any]) -> Iterator[ArchiveWriter]:
    writer, has_crc = ArchiveWriter(files, file), get_crc32_options()
    try:
        set_crc32_options(True)
        torch.save(dict(state), cast(IO[bytes], writer))  # it only calls write and flush
        yield writer
    except BaseException:
        if writer.failure is not None:
            raise writer.failure from None  # torch replaces the error of a failed write, and hides Ctrl-C
        raise
    finally:
        set_crc32_options(has_crc)


def write_small(files: Files, path: Path, content: bytes, *, syncs: bool = True) -> None:
    with files.create(path) as file:
        files.write(file, content)
        if syncs:
            files.sync(file)
    if syncs and files.read(path, len(content) + 1) != content:
        raise OSError(errno.EIO, f"{path}: the content read back differs from the content written")
