"""A checkpoint is one file: torch's archive, whose comment, at its very end, is the manifest.

A zip archive ends with a record whose last two bytes are the length of its comment. The digest in the manifest covers
all bytes up to these two but the content of large records, whose CRC-32 are in the directory, which it covers. The
manifest has a digest of its own, and the length is that of the manifest or the file is damaged: every byte of the
file is verified. Torch reads such a file as any other.
"""

from __future__ import annotations

import errno
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from ....events.checks import PLAIN
from ..state.schema import CONTAINERS
from .files import PIECE, ArchiveWriter, Files
from .manifest import Entry, encode
from .untrusted_files import open_regular

NO_STORAGES = PLAIN | frozenset(CONTAINERS)
MOST_HEAD = 2**24  # bytes of a pickled state, without its tensors


class Pickle:
    """What `torch.save` uses as the module `pickle`: a state holds hundreds of plain values, and torch asks of each."""

    class Pickler(pickle.Pickler):
        """Asks its subclass, which torch makes at each save, only of what may be the storage of a tensor."""

        def __init_subclass__(cls) -> None:
            ask: Callable[[Any, Any], Any] = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                return None if type(value) in NO_STORAGES else ask(self, value)

            cls.persistent_id = persistent_id  # type: ignore[method-assign]  # the same signature


def write_checkpoint(
    files: Files, path: Path, state: Mapping[str, Any], entry: Entry, date: int, *, read_back: bool
) -> Entry:
    """Write a state and its manifest into one file, and make it durable; return the entry with size and digest.

    Args:
        files: the operations on files.
        path: the file.
        state: plain types and tensors.
        entry: the manifest, without size and digest.
        date: the time of the file, in nanoseconds; see `Manifests.recent`.
        read_back: read the large records again, which the digest leaves out.

    Raises:
        OSError: a step failed.
    """
    with files.create(path) as file, _writing(files, file, state) as writer:
        entry = replace(entry, size=writer.size, sha256=writer.digest())
        writer.end(encode(entry))
        if (read_back or writer.leaves_out) and not _has_digest(files, path, entry, checks_data=read_back):
            raise OSError(errno.EIO, "what was read back is not what was written: the disk or the memory is faulty")
        files.date(file, date)
        files.sync(file)
    return entry


def rewrite_manifest(files: Files, path: Path, aside: Path, entry: Entry, date: int) -> None:
    """Write a checkpoint again under another name, with the manifest of an entry, and make it durable.

    Raises:
        OSError: a step failed, or the checkpoint is damaged.
    """
    with files.try_open(path) as source, files.create(aside) as file:
        left = entry.size - 2
        while left and (piece := source.read(min(left, PIECE))):
            files.write(file, piece)
            left -= len(piece)
        manifest = encode(entry)
        files.write(file, len(manifest).to_bytes(2, "little") + manifest)
        if not _has_digest(files, aside, entry):
            raise OSError(errno.EIO, f"{path} is damaged: its content is not the one in its manifest")
        files.date(file, date)
        files.sync(file)


def _has_digest(files: Files, path: Path, entry: Entry, *, checks_data: bool = True) -> bool:
    with suppress(ValueError):
        return files.archive_digest(path, entry.size, checks_data=checks_data) == entry.sha256
    return False


def write_state(files: Files, path: Path, state: Mapping[str, Any]) -> tuple[int, str]:
    """Write a state without a manifest and make it durable; return its size and its digest.

    Raises:
        OSError: a step failed.
    """
    with files.create(path) as file, _writing(files, file, state) as writer:
        writer.finish()
        files.sync(file)
    return files.digest(path)


@contextmanager
def _writing(files: Files, file: FileIO, state: Mapping[str, Any]) -> Iterator[ArchiveWriter]:
    writer, has_crc = ArchiveWriter(files, file), get_crc32_options()
    try:
        set_crc32_options(True)
        torch.save(dict(state), cast(IO[bytes], writer), pickle_module=Pickle)  # it only calls write and flush
        yield writer
    except BaseException:
        if writer.failure is not None:
            raise writer.failure from None  # torch replaces the error of a failed write, and hides Ctrl-C
        raise
    finally:
        set_crc32_options(has_crc)


def write_small(files: Files, path: Path, content: bytes, *, syncs: bool = True) -> None:
    """Write a small file and, with `syncs`, make its content durable and read it back.

    Raises:
        OSError: a step failed, or the content read back differs.
    """
    with files.create(path) as file:
        files.write(file, content)
        if syncs:
            files.sync(file)
    if syncs and files.read(path, len(content) + 1) != content:
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
