"""Read files from any source safely: no pipe blocks, no content runs code or fills the memory."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from io import BufferedReader
from math import prod
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any, NoReturn, Self
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo
from zlib import crc32

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ....events.checks import PLAIN
from ...system.errors import is_of_machine
from ..schema import CONTAINERS, MAPPINGS
from ..tree import check_tree

FOLLOW_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file, or a symbolic link to one, for reading.

    Raises:
        ValueError: it is something else, such as a folder, a pipe or a device.
        OSError: it does not exist, or cannot be opened.
    """
    problem = ValueError(f"{path} is not a regular file: a folder, a link, a pipe or a device has that name")
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise problem from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise problem
    return os.fdopen(handle, "rb")


def read_range(path: Path | str, begin: int, most: int) -> tuple[bytes, int]:
    """Return up to `most` bytes of a regular file from a position, and the size of the file.

    A negative position is counted from the end.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(begin if begin >= 0 else max(0, size + begin))
        return file.read(most), size


def read_small(path: Path | str, most: int) -> bytes:
    """Return all of a regular file; raise ValueError if it is larger than `most` bytes."""
    content, size = read_range(path, 0, most)
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes, at most {most:,} are expected: it is not a file of heliograph")
    return content


def cause(error: Exception) -> str:
    # without torch's advice to read the file unsafely
    inner = error.__context__ if isinstance(error, UnpicklingError) else None
    return f"{type(error).__name__}: {inner or error}"


class UnreadableError(ValueError):
    """A file that matches the digest in its manifest but cannot be read: that is not damage."""


# With `is_verified`, the file matches the digest in its manifest. Otherwise a RuntimeError of torch may be damage.
def refuse_unread(name: Path | str, error: Exception, *, is_verified: bool = False) -> NoReturn:
    if not is_of_machine(error, is_verified=is_verified):
        if is_verified:
            raise UnreadableError(
                f"{name} matches the digest in its manifest, so it is intact, but it cannot be read: {cause(error)}. "
                f"Resume another checkpoint by its path, or move this file away."
            ) from error
        raise ValueError(f"{name} cannot be read: {cause(error)}") from error
    error.add_note(f"{name} could not be read, but no damage was detected.")
    raise error


EXPANDED = 2**40  # bytes: an expanded view may be larger than its file, but not than any memory


def _records(file: BufferedReader, path: Path) -> list[ZipInfo]:
    try:
        with ZipFile(file) as archive:
            return archive.infolist()
    except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        problem = "is empty" if file.seek(0, 2) == 0 else "is damaged, or was not written by torch.save"
        raise ValueError(f"{path} {problem}: {error}") from None


def check_archive(file: BufferedReader, path: Path, *, checks_data: bool = False) -> None:
    """Compare the sizes of an archive's records with the size of the file, before any record is read.

    Torch does not compress. A compressed record could expand a thousandfold in memory. `checks_data` also compares the
    records with their checksums.

    Raises:
        ValueError: it is not an archive of torch, a record is compressed, or the records are larger than the file.
    """
    records, size = _records(file, path), file.seek(0, 2)
    packed = [record.filename for record in records if record.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is not a file of torch.save: its record {packed[0]!r} is compressed.")
    claimed = sum(record.file_size for record in records)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its records claim {claimed:,} bytes, the file has {size:,}.")
    try:
        broken = ZipFile(file).testzip() if checks_data else None
    except (BadZipFile, ValueError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if broken is not None:
        raise ValueError(f"{path} is damaged, or was not written by torch.save: the checksum of {broken} is wrong.")


def check_content(value: Any, path: Path) -> None:
    try:
        check_tree(value, "its content")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    size = path.stat().st_size
    for tensor in tensors_in(value):
        claimed = prod(tensor.shape) * tensor.element_size()
        if tensor.layout is torch.strided and claimed > max(size, EXPANDED):
            raise ValueError(
                f"{path} is damaged or forged: a tensor of {list(tensor.shape)} claims {claimed:,} bytes, the file has "
                f"{size:,}."
            )


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


LARGE = 2**14  # bytes of a record whose content is verified by its CRC-32


def archive_digest(file: BufferedReader, size: int, path: Path, *, checks_data: bool) -> str:
    """Return the SHA-256 of an archive of torch, without the content of its large records and its last two bytes.

    The directory of the archive is covered and holds the CRC-32 of these records, so torch's own pass over the data of
    a save suffices. The digest identifies a checkpoint and detects any change outside the large records. The CRC-32
    detects any flipped bit and any burst in a large record, and all but one of 4 billion other damages.

    Args:
        file: the archive.
        size: how many bytes of the file are the archive, without its comment.
        path: for messages.
        checks_data: compare the large records with their CRC-32.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    digest, at, buffer = sha256(), 0, memoryview(bytearray(2**18))

    def pieces(end: int) -> Iterator[memoryview]:
        nonlocal at
        file.seek(at)
        while at < end and (count := file.readinto(buffer[: min(end - at, len(buffer))])):
            at += count
            yield buffer[:count]
        if at != end:
            raise ValueError(f"{path} is damaged: the size of a record does not match the directory.")

    large = (
        record for record in _records(file, path) if record.compress_type == ZIP_STORED and record.file_size >= LARGE
    )
    for record in sorted(large, key=lambda item: item.header_offset):
        file.seek(record.header_offset + 26)
        lengths = file.read(4)
        begin = record.header_offset + 30 + sum(int.from_bytes(part, "little") for part in (lengths[:2], lengths[2:]))
        for piece in pieces(begin):
            digest.update(piece)
        end, crc = begin + record.file_size, 0
        for piece in pieces(end) if checks_data else ():
            crc = crc32(piece, crc)
        if checks_data and crc != record.CRC:
            raise ValueError(f"{path} is damaged: the CRC-32 of its record {record.filename!r} does not match.")
        at = end
    for piece in pieces(size - 2):
        digest.update(piece)
    return digest.hexdigest()


PATH = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")


class Record:
    """The attributes of an object that was read without its class; its code does not run."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)  # unpickling may not call `__init__`

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # a class with slots has two
            vars(self).update(part or {})


# Paths are read as text: their class may be of another operating system.
def plain_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def plain_text(value: Any = "") -> str:
    return str(value)


def read_foreign(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Read a file of another program as plain types and tensors; see `read_with_stand_ins`."""
    content = records_as_dicts(read_with_stand_ins(path, records, texts))
    check_content(content, path)
    return content


def read_with_stand_ins(path: Path, records: Collection[str] = (), texts: str = "(?!)") -> Any:
    """Read a file with `weights_only=True`, with stand-ins for objects of some classes.

    Args:
        path: a file that `torch.save` wrote.
        records: patterns of classes whose objects are read as `Record`.
        texts: the pattern of enumerations of strings, which are read as strings.

    Raises:
        ValueError: the file is damaged, or holds objects of other classes; their names are listed.
    """
    with open_regular(path) as file:
        check_archive(file, path, checks_data=True)
    try:
        stand_ins = {name: _stand_in(name, records, texts) for name in get_unsafe_globals_in_checkpoint(path)}
    except Exception as error:  # noqa: BLE001  # another pickle than torch's fails in many ways
        refuse_unread(path, error)
    refuse_unknown(path, [name for name, stand_in in stand_ins.items() if stand_in is None])
    try:
        with safe_globals([(stand_in, name) for name, stand_in in stand_ins.items() if stand_in is not None]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # torch.load fails in many ways, too
        refuse_unread(path, error)


def refuse_unknown(path: Path, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{path} holds objects of {', '.join(sorted(names))}: creating them could run code, so it is refused. "
            f"Save weights as torch.save(module.state_dict(), path). To migrate a checkpoint, `heliograph checkpoint "
            f"migrate {path} --as-data {sorted(names)[0]}`, a command of heliograph-cli, reads only the attributes of "
            f"such objects, and runs no code."
        )


def _stand_in(name: str, records: Collection[str], texts: str) -> Callable[..., Any] | None:
    if PATH.fullmatch(name):
        return plain_path
    if re.fullmatch(texts, name):
        return plain_text
    return Record if any(re.fullmatch(pattern, name) for pattern in records) else None


def records_as_dicts(value: Any) -> Any:
    """Return nested containers with each `Record` as a dict of its attributes, and each set as a list.

    Shared objects stay shared.

    Raises:
        ValueError: something holds itself, or is nested too deep.
    """
    try:
        return _plain(value, {})
    except RecursionError:
        raise ValueError("something in it holds itself, or is nested very deep") from None


def _plain(value: Any, made: dict[int, Any]) -> Any:
    if id(value) not in made:
        made[id(value)] = _make_plain(value, made)
    return made[id(value)]


def _make_plain(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, Record):
        return _plain(vars(value), made)
    if isinstance(value, Mapping) and not isinstance(value, Counter):  # a scheduler counts with one
        return {_plain(key, made): _plain(item, made) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        items = [_plain(item, made) for item in value]
        return tuple(items) if type(value) is tuple else items
    return value
