"""The sockets of groups: kept from forked children, which would keep a dead rank's connections open."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Socket = tuple[int, int]  # its descriptor and its inode: descriptors are used again
FOLDER = Path("/dev/fd")  # of this process's descriptors; Windows has none, and forks no children
_known: set[Socket] = set()


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Let every child that is forked later, such as a worker of a loader, close what sockets are opened within."""
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        _known.intersection_update(now)
        _known.update(now - before)


def _sockets() -> set[Socket]:
    found: set[Socket] = set()
    for name in os.listdir(FOLDER) if FOLDER.is_dir() else ():  # noqa: PTH208  # numbers, not files
        with suppress(OSError):  # it was that of the listing
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close() -> None:
    for number, inode in _known:
        with suppress(OSError):  # closed before
            if os.fstat(number).st_ino == inode:
                os.close(number)
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close)
