"""Reading files that may be anyone's: a pipe must not make us wait, nor a part that claims too much fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from ..state.plain import MAPPINGS, SEQUENCES, check_tree

FOLLOW_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}


def open_regular(path: Path | str, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: the file.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: there is something else of that name, such as a folder, a pipe or a device.
        OSError: it is not there, or cannot be opened.
    """
    return os.fdopen(_opened(path, follow)[0], "rb")


def read_small(path: Path | str, most: int, *, follow: bool = True) -> bytes:
    """Return all of a regular file.

    Args:
        path: the file.
        most: bytes; a larger file is not read.
        follow: accept a symbolic link that leads to one.

    Raises:
        ValueError: it is larger, or no file; see `open_regular`.
        OSError: it is not there, or cannot be read.
    """
    handle, size = _opened(path, follow)
    try:
        if size > most:
            raise ValueError(f"{path} is no file of ours: it has {size:,} bytes, at most {most:,} are expected")
        content = os.read(handle, size + 1)
        while len(content) < size and (more := os.read(handle, size - len(content))):
            content += more
        return content
    finally:
        os.close(handle)


def _opened(path: Path | str, follow: bool) -> tuple[int, int]:
    """Return the handle of a regular file, and how many bytes it has."""
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
    return ValueError(f"{path} is no regular file: a folder, a link, a pipe or a device has that name")


EXPANDED = 2**40  # bytes: a small tensor may show its values in many places, but no memory has so many


def check_archive(path: Path) -> None:
    """Hold what the parts of a file claim against its size, before any of them is read.

    Torch stores its tensors as they are. A part that is compressed could grow a thousandfold in the memory.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no archive of torch's, a part is compressed, or they claim more bytes than there are.
    """
    with open_regular(path) as file:
        try:
            with ZipFile(file) as archive:
                parts = archive.infolist()
        except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise ValueError(f"{path} is damaged, or no file of torch.save: {type(error).__name__}: {error}") from None
        size = file.seek(0, 2)
    packed = [each.filename for each in parts if each.compress_type != ZIP_STORED]
    if packed:
        raise ValueError(f"{path} is no file of torch.save: its part {packed[0]!r} is compressed.")
    claimed = sum(each.file_size for each in parts)
    if claimed > size:
        raise ValueError(f"{path} is damaged or forged: its parts claim {claimed:,} bytes, the file has {size:,}.")


def check_content(value: Any, path: Path) -> None:
    """Raise ValueError where what was read from a file is no tree, or a tensor claims more bytes than the file has."""
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
    """Yield the tensors in a tree; what is in several places, once."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (*MAPPINGS, *SEQUENCES) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if type(value) in MAPPINGS else value:
            yield from _tensors(item, seen)
