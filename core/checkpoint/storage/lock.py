"""A lock that allows one writer at a time for the files of a run."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from time import monotonic, sleep

from filelock import FileLock, Timeout

from .files import NOT_THERE, SYSTEM

TICK = 0.1  # seconds between two tries
LONGEST = 1024  # bytes of a `.holder` file
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


class Lock:
    """Lock a file until it is released or the process ends; child processes do not inherit it.

    A second holder is refused, also in the same process. If the file system has no locks, nothing is locked. The
    process id and the host of the holder are in a file beside it that ends in `.holder`.

    Args:
        path: the lock file, which ends in `.lock`; created by the holder, removed when it is released.
        purpose: what the lock is for, for the error message.
        remedy: what to do other than closing the other process, for the error message.
    """

    def __init__(self, path: Path, purpose: str, remedy: str = "give this run another name= or folder") -> None:
        self.path, self.purpose, self.remedy = path, purpose, remedy
        self._holder = path.with_suffix(".holder")
        self._lock: FileLock | None = None

    def acquire(self, patience: float = 0.0) -> bool:
        """Acquire the lock; return False if the file system has no locks.

        Args:
            patience: seconds to wait for another process to release it.

        Raises:
            ValueError: another process or another lock of this process holds it, or `path` is not a regular file.
            OSError: it cannot be opened.
        """
        limit, lock = monotonic() + patience, FileLock(self.path, thread_local=False, fallback_to_soft=False)
        while self._lock is None:
            self._check_is_file()
            try:
                lock.acquire(timeout=0)
                self._lock = lock
            except Timeout:
                if not self.path.exists():  # released in between
                    continue
                holder = self._read_holder()
                if monotonic() >= limit or holder == _this_process():
                    raise self._refusal(holder) from None
                sleep(TICK)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self.path.unlink(missing_ok=True)
                return False
        try:
            SYSTEM.unlink(self._holder)  # a link of that name is not followed
            with SYSTEM.create(self._holder) as file:
                file.write(f"{' '.join(_this_process())}\n".encode())
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        lock, self._lock = self._lock, None
        if lock is not None and lock.is_locked:  # not in a forked child
            self._holder.unlink(missing_ok=True)
            with suppress(PermissionError):  # Windows: an open file
                self.path.unlink(missing_ok=True)
            lock.release()

    def _check_is_file(self) -> None:
        # a link to another file, for example, is refused
        try:
            status = os.lstat(self.path)
        except NOT_THERE:
            return
        if not S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise ValueError(f"{self.path} is a link, a folder, a pipe or a device, not a lock file: remove it.")

    def _read_holder(self) -> list[str]:
        with suppress(OSError, ValueError):
            return SYSTEM.try_range(self._holder, 0, LONGEST)[0].decode(errors="replace").split()
        return []

    def _refusal(self, holder: list[str]) -> ValueError:
        process = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
        note = " (this process)" if holder == _this_process() else ""
        return ValueError(
            f"{self.purpose} by {process}{note}, which holds {self.path}: close that one first, or {self.remedy}."
        )


def _this_process() -> list[str]:
    return [str(os.getpid()), socket.gethostname()]
