"""Reading files from any source: no pipe may block, no content may run code or fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn
from zipfile import ZIP_STORED, BadZipFile, ZipFile

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
    handle, size = open_handle(path, follow=follow)
    try:
        if size > most:
            raise ValueError(f"{path} is not a file of ours: it has {size:,} bytes, at most {most:,} are expected")
        content = os.read(handle, size + 1)
        while len(content) < size and (more := os.read(handle, size - len(content))):
            content += more
        return content
    finally:
        os.close(handle)


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


def refuse_unread(what: Path | str, error: Exception, *, is_verified: bool = False) -> NoReturn:
    """Raise the error that reading a file has raised, or ValueError if the file is the cause.

    Args:
        what: the file.
        error: the error.
        is_verified: whether the file has the digest in its manifest. Otherwise a RuntimeError of torch may be damage.
    """
    if not is_of_machine(error, is_verified=is_verified):
        raise ValueError(f"{what} cannot be read: {cause(error)}") from error
    error.add_note(f"{what} could not be read, but no damage was found.")
    raise error


EXPANDED = 2**40  # bytes: an expanded view may be larger than its file, but not than any memory


def check_archive(path: Path) -> None:
    """Compare the sizes of an archive's records with that of the file, before any of them is read.

    Torch does not compress. A compressed record could expand a thousandfold in memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an archive of torch, a record is compressed, or they claim more bytes than the file has.
    """
    with open_regular(path) as file:
        try:
            with ZipFile(file) as archive:
                parts = archive.infolist()
        except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            what = "is empty" if file.seek(0, 2) == 0 else "is damaged, or was not written by torch.save"
            raise ValueError(f"{path} {what}: {error}") from None
        size = file.seek(0, 2)
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
