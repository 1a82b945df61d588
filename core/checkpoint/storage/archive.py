"""A checkpoint is one file: torch's archive, whose comment, at its very end, is the manifest.

A zip archive ends with a record whose last two bytes are the length of its comment. The digest in the manifest covers
all bytes up to these two, the manifest has a digest of its own, and the length is that of the manifest or the file is
damaged: every byte of the file is verified. Torch reads such a file as any other.
"""

from __future__ import annotations

import errno
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ....events.checks import PLAIN
from ..state.schema import CONTAINERS, MAPPINGS, SEQUENCES
from .files import PIECE, Files, HashingWriter
from .manifest import END, END_SIZE, Entry, encode
from .untrusted_files import open_regular

NO_STORAGES = PLAIN | frozenset(CONTAINERS)
MOST_HEAD = 2**24  # bytes of a pickled state, without its tensors
View = tuple[Any, ...]
SLACK = 64 * 1024  # the archive's directory, the manifest, a pointer
PER_TENSOR = 512  # a record's header, its padding, its entry in the directory
PER_VALUE = 16
TEXTS = frozenset({str, bytes})
NUMBERS = PLAIN - TEXTS


class Pickle:
    """What `torch.save` uses as the module `pickle`: a state holds hundreds of plain values, and torch asks of each."""

    class Pickler(pickle.Pickler):
        """Asks its subclass, which torch makes at each save, only of what may be the storage of a tensor."""

        def __init_subclass__(cls) -> None:
            ask: Callable[[Any, Any], Any] = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                return None if type(value) in NO_STORAGES else ask(self, value)

            cls.persistent_id = persistent_id  # type: ignore[method-assign]  # the same signature


def write_checkpoint(files: Files, path: Path, state: Mapping[str, Any], entry: Entry) -> Entry:
    """Write a state and its manifest into one file, and make it durable; return the entry with size and digest.

    Raises:
        OSError: a step failed.
    """
    with files.create(path) as file, _writing(files, file, state) as writer:
        end = writer.take_back(END_SIZE)
        if len(end) != END_SIZE or end[:4] != END or end[-2:] != b"\0\0":
            raise RuntimeError(f"torch {torch.__version__} ends an archive in another way than is known")
        writer.write(end[:-2])
        entry = replace(entry, size=writer.size + 2, sha256=writer.finish())
        _end(writer, entry)
        files.sync(file)
    return entry


def rewrite_manifest(files: Files, path: Path, aside: Path, entry: Entry) -> None:
    """Write a checkpoint again under another name, with the manifest of an entry, and make it durable.

    Raises:
        OSError: a step failed, or the checkpoint is damaged.
    """
    with files.try_open(path) as source, files.create(aside) as file:
        writer = HashingWriter(files, file)
        while (left := entry.size - 2 - writer.size) and (piece := source.read(min(left, PIECE))):
            writer.write(piece)
        if writer.finish() != entry.sha256:
            raise OSError(errno.EIO, f"{path} is damaged: its SHA-256 is not the one in its manifest")
        _end(writer, entry)
        files.sync(file)


def _end(writer: HashingWriter, entry: Entry) -> None:
    manifest = encode(entry)
    writer.write(len(manifest).to_bytes(2, "little") + manifest)
    writer.finish()


def write_state(files: Files, path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    """Write a state without a manifest and make it durable; return its size and its digest.

    Raises:
        OSError: a step failed.
    """
    with files.create(path) as file, _writing(files, file, state) as writer:
        written = writer.size, writer.finish()
        files.sync(file)
    return written


@contextmanager
def _writing(files: Files, file: FileIO, state: Mapping[str, Any]) -> Iterator[HashingWriter]:
    writer = HashingWriter(files, file)
    try:
        torch.save(dict(state), cast(IO[bytes], writer), pickle_module=Pickle)  # it only calls write and flush
        yield writer
    except BaseException:
        if writer.failure is not None:
            raise writer.failure from None  # torch replaces the error of a failed write, and hides Ctrl-C
        raise


def write_small(files: Files, path: Path, content: bytes, *, syncs: bool = True) -> None:
    """Write a small file and, with `syncs`, make its content durable.

    Raises:
        OSError: a step failed, or the content read back differs.
    """
    with files.create(path) as file:
        files.write(file, content)
        if syncs:
            files.sync(file)
    if files.read(path, len(content)) != content:
        raise OSError(errno.EIO, f"what was read back of {path} is not what was written")


class Head(NamedTuple):
    """The first facts in a checkpoint that has lost its end.

    Attributes:
        run_name: the name that the program gave the run.
        training: the id of the training.
        saved_at: when, in seconds since the epoch.
    """

    run_name: str
    training: str
    saved_at: float


def read_head(path: Path) -> Head | None:
    """Return whose checkpoint a damaged file was, from its beginning, which is the state; nothing is unpickled.

    None if that cannot be read.
    """
    facts, last = dict[str, Any](), ""
    with suppress(OSError, ValueError, IndexError), open_regular(path) as file:
        content = file.read(MOST_HEAD)
        for operation, argument, _ in pickletools.genops(content[content.index(b"\x80\x02") :]):
            if argument is None or operation.name in ("BINPUT", "LONG_BINPUT"):
                continue
            if last in ("run_name", "training_id", "saved_at"):
                facts.setdefault(last, argument)
            last = argument if isinstance(argument, str) else ""
            if len(facts) == len(Head._fields):
                break
    run_name, training, saved_at = (facts.get(name) for name in ("run_name", "training_id", "saved_at"))
    if not isinstance(run_name, str) or not isinstance(training, str) or not isinstance(saved_at, float):
        return None
    return Head(run_name, training, saved_at)


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
