"""Reading files from any source: no pipe may block, no content may run code or fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from io import BufferedReader
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo
from zlib import crc32

import torch
from torch import Tensor

from ...system.errors import is_of_machine
from ..state.schema import MAPPINGS, SEQUENCES, check_tree

FOLLOW_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}


def open_regular(path: Path | str, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is something else, such as a folder, a pipe or a device.
        OSError: it does not exist, or cannot be opened.
    """
    return os.fdopen(open_handle(path, follow=follow)[0], "rb")


def read_range(path: Path | str, begin: int, most: int, *, follow: bool = True) -> tuple[bytes, int]:
    """Return up to `most` bytes of a regular file from a position, and the size of the file.

    Args:
        path: the file.
        begin: the position; a negative one is counted from the end.
        most: bytes.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is not a regular file; see `open_regular`.
        OSError: it does not exist, or cannot be read.
    """
    handle, size = open_handle(path, follow=follow)
    try:
        begin = begin if begin >= 0 else max(0, size + begin)
        end = min(size, begin + most)
        if begin:
            os.lseek(handle, begin, os.SEEK_SET)
        content = os.read(handle, max(0, end - begin))
        while begin + len(content) < end and (more := os.read(handle, end - begin - len(content))):
            content += more
        return content, size
    finally:
        os.close(handle)


def read_small(path: Path | str, most: int, *, follow: bool = True) -> bytes:
    """Return all of a regular file.

    Args:
        path: the file.
        most: bytes; a larger file is not read.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is larger, or not a regular file; see `open_regular`.
        OSError: it does not exist, or cannot be read.
    """
    content, size = read_range(path, 0, most, follow=follow)
    if size > most:
        raise ValueError(f"{path} is not a file of ours: it has {size:,} bytes, at most {most:,} are expected")
    return content


def open_handle(path: Path | str, *, follow: bool = True) -> tuple[int, int]:
    """Return the handle and the size of a regular file."""
    try:
        handle = os.open(path, _FLAGS | (0 if follow else FOLLOW_NO_LINK))
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise _no_file(path)
    return handle, status.st_size


def _no_file(path: Path | str) -> ValueError:
    return ValueError(f"{path} is not a regular file: a folder, a link, a pipe or a device has that name")


def cause(error: Exception) -> str:
    """Return why reading failed, without torch's advice to read the file unsafely."""
    inner = error.__context__ if isinstance(error, UnpicklingError) else None
    return f"{type(error).__name__}: {inner or error}"


class UnreadableError(ValueError):
    """A file has the digest in its manifest and still cannot be read: that is not damage."""


def refuse_unread(what: Path | str, error: Exception, *, is_verified: bool = False) -> NoReturn:
    """Raise the error that reading a file has raised, or ValueError if the content of the file is the cause.

    Args:
        what: the file.
        error: the error.
        is_verified: whether the file has the digest in its manifest. Otherwise a RuntimeError of torch may be damage.
    """
    if not is_of_machine(error, is_verified=is_verified):
        if is_verified:
            raise UnreadableError(
                f"{what} is intact, since its digest is the one in its manifest, but cannot be read: {cause(error)}. "
                f"Resume another one by its path, or move this file away."
            ) from error
        raise ValueError(f"{what} cannot be read: {cause(error)}") from error
    error.add_note(f"{what} could not be read, but no damage was found.")
    raise error


EXPANDED = 2**40  # bytes: an expanded view may be larger than its file, but not than any memory


def _records(file: BufferedReader, path: Path) -> list[ZipInfo]:
    try:
        with ZipFile(file) as archive:
            return archive.infolist()
    except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        what = "is empty" if file.seek(0, 2) == 0 else "is damaged, or was not written by torch.save"
        raise ValueError(f"{path} {what}: {error}") from None


def check_archive(file: BufferedReader, path: Path) -> None:
    """Compare the sizes of an archive's records with that of the file, before any of them is read.

    Torch does not compress. A compressed record could expand a thousandfold in memory.

    Raises:
        ValueError: it is not an archive of torch, a record is compressed, or they claim more bytes than the file has.
    """
    parts, size = _records(file, path), file.seek(0, 2)
    packed = [each.filename for each in parts if each.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is not a file of torch.save: its part {packed[0]!r} is compressed.")
    claimed = sum(each.file_size for each in parts)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its parts claim {claimed:,} bytes, the file has {size:,}.")


def check_content(value: Any, path: Path) -> None:
    """Raise ValueError if the content of a file is not a tree, or a tensor claims more bytes than the file has."""
    try:
        check_tree(value, "its content")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None
    size = path.stat().st_size
    for tensor in _tensors(value, set()):
        claimed = prod(tensor.shape) * tensor.element_size()
        if tensor.layout is torch.strided and claimed > max(size, EXPANDED):
            raise ValueError(
                f"{path} is damaged or forged: a tensor of {list(tensor.shape)} claims {claimed:,} bytes, the file has "
                f"{size:,}."
            )


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a tree; a shared container is visited once."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (*MAPPINGS, *SEQUENCES) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if type(value) in MAPPINGS else value:
            yield from _tensors(item, seen)


LARGE = 2**14  # bytes of a record whose content is verified by its CRC-32


def archive_digest(file: BufferedReader, size: int, path: Path, *, checks_data: bool) -> str:
    """Return the SHA-256 of an archive of torch, without the content of its large records and its last two bytes.

    The directory, which is a part of it, holds the CRC-32 of these records. So torch's own pass over the data of a
    save is enough. The digest says which checkpoint a file is, and finds any change outside of the large records; the
    CRC-32 finds any flipped bit and any burst in one, and all but one of 4 billion other damages.

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
            raise ValueError(f"{path} is damaged: a part of it has another size than its directory says.")

    records = (each for each in _records(file, path) if each.compress_type == ZIP_STORED and each.file_size >= LARGE)
    for record in sorted(records, key=lambda record: record.header_offset):
        file.seek(record.header_offset + 26)
        lengths = file.read(4)
        begin = record.header_offset + 30 + sum(int.from_bytes(part, "little") for part in (lengths[:2], lengths[2:]))
        for piece in pieces(begin):
            digest.update(piece)
        end, crc = begin + record.file_size, 0
        for piece in pieces(end) if checks_data else ():
            crc = crc32(piece, crc)
        if checks_data and crc != record.CRC:
            raise ValueError(f"{path} is damaged: its record {record.filename!r} has another CRC-32 than when written.")
        at = end
    for piece in pieces(size - 2):
        digest.update(piece)
    return digest.hexdigest()
