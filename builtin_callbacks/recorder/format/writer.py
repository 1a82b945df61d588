"""Append to a recording: whole lines, by one process at a time, and none of them lost while the disk is full."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from itertools import count
from pathlib import Path

from ....core.checkpoint.storage import clean
from ....core.checkpoint.storage.lock import Lock
from .lines import encode_head, encode_lost
from .reader import SUFFIX, leftover

UNWRITTEN = 2**20  # bytes that wait for room on the disk


class Writer:
    """An open recording.

    Each call of `write` is one write of the system's, so that a kill leaves whole lines but for the last. What cannot
    be written waits for the next call; of what waits too long, only how many lines it was is kept.

    Attributes:
        path: the file.
        is_failing: whether what was last to be written could not be.
    """

    def __init__(self, path: Path, file: int, lock: Lock) -> None:
        self.path, self._file, self._lock = path, file, lock
        self._unwritten, self._lost, self._is_torn, self.is_failing = b"", 0, False, False

    @classmethod
    def new(cls, folder: Path, run: str) -> Writer:
        """Begin a file of a name of its own; its folder is made where it is missing.

        Raises:
            OSError: that is not possible.
        """
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{clean(run)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        for number in count(1):
            path = folder / f"{stem}{f'_{number}' if number > 1 else ''}{SUFFIX}"
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
                break
            except FileExistsError:  # of the same second
                continue
        lock = _lock_of(path)
        with ExitStack() as undo:  # nothing is left of a file that cannot be begun
            undo.callback(lock.release)
            undo.callback(path.unlink)
            undo.callback(os.close, file)
            lock.acquire()
            writer = cls(path, file, lock)
            writer.write([encode_head()])
            undo.pop_all()
        return writer

    @classmethod
    def again(cls, path: Path) -> Writer:
        """Go on in a file, whatever became of the process that wrote it before.

        Raises:
            OSError: that is not possible.
            ValueError: another process writes it, or it is no recording that this version can read.
        """
        lock = _lock_of(path)
        lock.acquire()
        with ExitStack() as undo:
            undo.callback(lock.release)
            missing = leftover(path)
            file = os.open(path, os.O_RDWR | os.O_APPEND)
            undo.callback(os.close, file)
            writer = cls(path, file, lock)
            writer._is_torn = os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n"
            writer.write(missing)
            undo.pop_all()
        return writer

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, behind those that are still unwritten.

        Raises:
            OSError: they could not be written; not raised again until some could.
        """
        self._unwritten += "".join(f"{line}\n" for line in lines).encode()
        if not self._unwritten:
            return
        head = b"\n" * self._is_torn + (f"{encode_lost(self._lost)}\n".encode() if self._lost else b"")
        data, done = head + self._unwritten, 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:
            self._keep(data, done, len(head))
            if not self.is_failing:
                self.is_failing = True
                raise
            return
        self._unwritten, self._lost, self._is_torn, self.is_failing = b"", 0, False, False

    def close(self, lines: Iterable[str] = ()) -> None:
        """Write the last lines, and let go of the file.

        Raises:
            OSError: it could not be written, and is lost.
        """
        self.is_failing = False
        try:
            self.write(lines)
        finally:
            os.close(self._file)
            self._lock.release()

    def _keep(self, data: bytes, done: int, head: int) -> None:
        """Keep the lines of which some is unwritten, as far as there is room for them."""
        whole = data.rfind(b"\n", 0, done) + 1
        if done:
            self._is_torn = whole < done
        if whole >= head:
            self._lost = 0
        self._unwritten = data[max(whole, head) :]
        if len(self._unwritten) > UNWRITTEN:
            self._lost += self._unwritten.count(b"\n")
            self._unwritten = b""


def _lock_of(path: Path) -> Lock:
    """Return the lock of a recording, for where the system has such locks."""
    return Lock(path.with_name(path.name + ".lock"), "This recording is written")
