"""One writer at a time for the files of a run."""

from __future__ import annotations

import errno
import os
import socket
import stat
import weakref
from io import FileIO
from pathlib import Path
from time import monotonic, sleep

from .untrusted_files import FOLLOW_NO_LINK

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TICK = 0.1  # seconds between two tries
LONGEST = 1024  # bytes of what a lock's holder writes about itself
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """An advisory lock on a file, which ends with its process, however that ends.

    A second holder is refused, in the same process too. If the system has no `fcntl` (Windows), or the file system no
    locks, nothing is locked.

    Args:
        path: the lock file; created by the holder, removed when it is released.
        purpose: what the lock is for, for the error message.
        remedy: what to do other than closing the other process, for the error message.
    """

    def __init__(self, path: Path, purpose: str, remedy: str = "give this run another name= or folder") -> None:
        self.path, self.purpose, self.remedy = path, purpose, remedy
        self._file: FileIO | None = None

    def acquire(self, patience: float = 0.0) -> bool:
        """Acquire the lock; return False if there are no locks.

        Args:
            patience: seconds to wait for another process to release it.

        Raises:
            ValueError: another process holds it, or another lock of this process.
        """
        if fcntl is None:
            return False
        limit = monotonic() + patience
        while self._file is None:
            file = self._open()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with file:
                    if error.errno in _UNSUPPORTED:
                        self.path.unlink(missing_ok=True)
                        return False
                    holder = file.read(LONGEST).decode(errors="replace").split()
                if monotonic() >= limit or holder == _own():
                    raise self._refusal(holder) from None
                sleep(TICK)
                continue
            if _names(self.path, file):
                self._file = file
            else:  # its holder removed it before it was locked here
                file.close()
        self._file.truncate(0)
        self._file.write(f"{' '.join(_own())}\n".encode())
        _held.add(self)
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            if _names(self.path, file):
                self.path.unlink()
        _held.discard(self)

    def forget(self) -> None:
        """Close the file in a forked child, without releasing the lock of the parent.

        A child that kept the file open (a loader's worker, say) would hold the lock after its parent was killed.
        """
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        """Open the lock file, or make it.

        Raises:
            ValueError: something else has its name, such as a link to another file, which would be emptied.
            OSError: it cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | FOLLOW_NO_LINK
        try:
            file = FileIO(os.open(self.path, flags, 0o666), "r+")
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise self._not_a_lock() from None
            raise
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            file.close()
            raise self._not_a_lock()
        return file

    def _not_a_lock(self) -> ValueError:
        return ValueError(f"{self.path} is not a lock file, but a link, a folder, a pipe or a device: remove it.")

    def _refusal(self, holder: list[str]) -> ValueError:
        who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
        own = " (this very process)" if holder == _own() else ""
        return ValueError(
            f"{self.purpose} by {who}{own}, which holds {self.path}: close that one first, or {self.remedy}."
        )


def _own() -> list[str]:
    """Return what this process writes into its lock files: its id and host."""
    return [str(os.getpid()), socket.gethostname()]


def _names(path: Path, file: FileIO) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
