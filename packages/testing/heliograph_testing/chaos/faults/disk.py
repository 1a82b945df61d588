"""Faults of the disk: intercepts the file operations in a folder."""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .acts import kill
from .fault import KINDS, Fault
from .replacements import Replacements

Watch = Callable[[str, str], None]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRITING = frozenset("wax+")
BUFFER = 8192  # bytes, the default of open()


class WatchedDisk:
    """Intercepts operations that change files of a folder: create, write, sync, rename, remove.

    Covers all threads of this process: `open`, `io.FileIO`, `os.open`, and files opened by them. For files that were
    open before, only `os.write`, `os.pwrite` and `os.fsync` on Linux. Does not cover memory maps and files that C++
    code writes, for example `torch.save` with a path.

    Args:
        folder: the folder, including its subfolders.
        watch: called with the kind and the path before each operation. The operation raises its errors; a refused write
            writes half of its content.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder, self._watch = f"{folder.resolve()}{os.sep}", watch
        self._opened: dict[int, str] = {}
        self._replacements = Replacements(
            {
                builtins.open: _opener(self, builtins.open),
                io.FileIO: _watched_file(self, os.write),
                os.open: self._opening(os.open),
                os.write: self._writing(os.write),
                os.pwrite: self._writing(os.pwrite),
                os.fsync: self._syncing(os.fsync),
                os.rename: self._moving(os.rename),
                os.replace: self._moving(os.replace),
                os.unlink: self._naming("remove", os.unlink),
                os.remove: self._naming("remove", os.remove),
                os.mkdir: self._naming("create", os.mkdir),
            }
        )

    def apply(self) -> None:
        self._replacements.apply()

    def undo(self) -> None:
        self._replacements.undo()

    def show(self, kind: str, path: str | None) -> None:
        if path is not None and f"{path}{os.sep}".startswith(self._folder):
            self._watch(kind, path)

    def path_of(self, file: int) -> str | None:
        # None if the path is unknown.
        try:
            return os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115  # fast, called for each write
        except OSError:  # not on Linux, or closed
            return self._opened.get(file)

    def full_path(self, path: Any, folder: int | None = None) -> str | None:
        # Follows links in the folders of the path, but not the path itself.
        if isinstance(path, int):
            return self.path_of(path)
        base = "" if folder is None else self.path_of(folder) or ""
        head, tail = os.path.split(os.path.join(base, os.fsdecode(path)))  # noqa: PTH118  # may be bytes
        return os.path.join(os.path.realpath(head or "."), tail)  # noqa: PTH118

    def _opening(self, original: Callable[..., int]) -> Callable[..., int]:
        def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
            where = self.full_path(path, options.get("dir_fd"))
            if flags & WRITES:
                self.show("create", where)
            file = original(path, flags, *args, **options)
            self._opened[file] = where or ""
            return file

        return open_file

    def _writing(self, original: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, content: Any, *args: Any) -> int:
            try:
                self.show("write", self.path_of(file))
            except OSError:
                original(file, memoryview(content).cast("B")[: memoryview(content).nbytes // 2], *args)
                raise
            return original(file, content, *args)

        return write

    def _syncing(self, original: Callable[..., None]) -> Callable[..., None]:
        def sync(file: Any) -> None:
            self.show("sync", self.path_of(file if isinstance(file, int) else file.fileno()))
            original(file)

        return sync

    def _moving(self, original: Callable[..., None]) -> Callable[..., None]:
        def move(old: Any, new: Any, **options: Any) -> None:
            self.show("rename", self.full_path(new, options.get("dst_dir_fd")))
            original(old, new, **options)

        return move

    def _naming(self, kind: str, original: Callable[..., None]) -> Callable[..., None]:
        def change(path: Any, *args: Any, **options: Any) -> None:
            self.show(kind, self.full_path(path, options.get("dir_fd")))
            original(path, *args, **options)

        return change


def _watched_file(disk: WatchedDisk, write_some: Callable[..., int]) -> type[io.FileIO]:
    class WatchedFile(io.FileIO):
        def __init__(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> None:
            if WRITING.intersection(mode):
                disk.show("create", disk.full_path(file))
            super().__init__(file, mode, *args, **options)

        def write(self, content: Any, /) -> int:
            try:
                disk.show("write", disk.path_of(self.fileno()))
            except OSError:
                write_some(self.fileno(), memoryview(content).cast("B")[: memoryview(content).nbytes // 2])
                raise
            return super().write(content)

    return WatchedFile


def _opener(disk: WatchedDisk, original: Callable[..., Any]) -> Callable[..., Any]:
    def open_file(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not WRITING.intersection(mode):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = io.FileIO(
            file, mode.replace("b", "").replace("t", ""), closefd, opener
        )  # the double, while it is in place
        if buffering == 0:
            return raw
        size = BUFFER if buffering < 2 else buffering
        buffer: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    return open_file


class DiskFaults:
    """Faults whose event has occurred and that wait for their file operation, one after the other."""

    def __init__(self, folder: Path, note: Callable[[int, str], None], ignored: Path | None) -> None:
        self._note, self._ignored = note, str(ignored)
        self._waiting: deque[tuple[int, Fault]] = deque()
        self._seen = 0  # operations while the first fault waits
        self._disk = WatchedDisk(folder, self._operate)
        self._disk.apply()

    def add(self, number: int, fault: Fault) -> None:
        self._waiting.append((number, fault))

    def close(self) -> None:
        self._disk.undo()

    def _operate(self, kind: str, path: str) -> None:
        if not self._waiting or path == self._ignored:
            return
        number, fault = self._waiting[0]
        self._seen += 1
        first = max(1, fault.operation)
        if self._seen < first:
            return
        if self._seen == first:
            self._note(number, f"{KINDS[fault.kind].text}, starting at {kind} {Path(path).name}")
        if self._seen == first + fault.times - 1:
            self._waiting.popleft()
            self._seen = 0
        if fault.kind == "full-disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault.kind == "slow-disk":
            time.sleep(fault.seconds)
        else:
            kill()
