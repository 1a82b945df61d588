"""Reading files that may be somebody else's: a pipe must not make us wait, nor a large file fill the memory."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

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
