"""Append lines to a recording, from one process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from itertools import count
from pathlib import Path

from heliograph.spi import Lock, clean

from .lines import encode_head
from .reader import SUFFIX, check_head, lock_path


class RecordingWriter:
    """An open recording.

    `write` calls `os.write` once, so a kill can cut only the last line short. Lines that cannot be written, for example
    because the disk is full, are kept for the next call.

    Attributes:
        path: the file.
        is_failing: whether the last write failed.
    """

    def __init__(self, path: Path, file: int, lock: Lock) -> None:
        self.path, self._file, self._lock = path, file, lock
        self._pending, self._is_torn, self.is_failing = b"", False, False

    @classmethod
    def create(cls, folder: Path, run: str) -> RecordingWriter:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{clean(run)}_{datetime.now():%Y-%m-%d_%H-%M-%S}"
        for number in count(1):
            path = folder / f"{stem}{f'_{number}' if number > 1 else ''}{SUFFIX}"
            try:
                file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
                break
            except FileExistsError:  # created within the same second
                continue
        lock = _lock_of(path)
        with ExitStack() as undo:  # removes a file that cannot be written
            undo.callback(lock.release)
            undo.callback(path.unlink)
            undo.callback(os.close, file)
            lock.acquire()
            writer = cls(path, file, lock)
            writer.write([encode_head()])
            undo.pop_all()
        return writer

    @classmethod
    def reopen(cls, path: Path) -> RecordingWriter:
        lock = _lock_of(path)
        lock.acquire()
        with ExitStack() as undo:
            undo.callback(lock.release)
            with path.open("rb") as content:
                check_head(path, content.readline())
            file = os.open(path, os.O_RDWR | os.O_APPEND)
            undo.callback(os.close, file)
            writer = cls(path, file, lock)
            writer._is_torn = os.pread(file, 1, os.fstat(file).st_size - 1) != b"\n"
            undo.pop_all()
        return writer

    def add(self, lines: Iterable[str]) -> None:
        self._pending += "".join(f"{line}\n" for line in lines).encode()

    def write(self, lines: Iterable[str] = ()) -> None:
        """Append lines; an OSError is not raised again until a write succeeds."""
        self.add(lines)
        if not self._pending:
            return
        head = b"\n" * self._is_torn
        data, begin, done = head + self._pending, os.fstat(self._file).st_size, 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
        except OSError:
            self._keep(data, done, len(head))
            if not self.is_failing:
                self.is_failing = True
                raise
            return
        except BaseException:  # a Ctrl-C after a write, before its result is assigned
            self._keep(data, os.fstat(self._file).st_size - begin, len(head))
            raise
        self._pending, self._is_torn, self.is_failing = b"", False, False

    def close(self) -> None:
        self.is_failing = False
        try:
            self.write()
        finally:
            os.close(self._file)
            self._lock.release()

    def _keep(self, data: bytes, done: int, head: int) -> None:
        complete = data.rfind(b"\n", 0, done) + 1
        if done:
            self._is_torn = complete < done
        self._pending = data[max(complete, head) :]


def _lock_of(path: Path) -> Lock:
    return Lock(lock_path(path), "This recording is written")
