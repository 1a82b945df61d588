"""Faults of the disk and the clock: replaces functions of the standard library in all loaded modules."""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]  # of the standard library; it has no types
import builtins
import errno
import io
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .fault import KINDS, Fault

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRITING = frozenset("wax+")
OPEN = builtins.open


class Replacements:
    """Replaces functions and classes by doubles in every loaded module."""

    def __init__(self, doubles: Mapping[Any, Any]) -> None:
        self._doubles = {id(original): (original, double) for original, double in doubles.items()}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []

    def apply(self) -> None:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict) or module is sys.modules[__name__]:  # sys.modules may contain any object
                continue
            for name, value in list(names.items()):
                if id(value) in self._doubles:
                    self._replaced.append((names, name, value))
                    names[name] = self._doubles[id(value)][1]

    def undo(self) -> None:
        while self._replaced:
            names, name, original = self._replaced.pop()
            names[name] = original


class JumpingClock:
    """Jumps of `time.time` and `time.time_ns`; `time.monotonic` and file times do not change."""

    def __init__(self) -> None:
        self._offset = 0.0
        now, now_ns = time.time, time.time_ns
        self._replacements = Replacements(
            {now: lambda: now() + self._offset, now_ns: lambda: now_ns() + int(self._offset * 1e9)}
        )
        self._replacements.apply()

    def jump(self, seconds: float) -> None:
        self._offset += seconds

    def close(self) -> None:
        self._replacements.undo()


def _open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    # The implementation of `io` in Python, which writes by `os.open` and `os.write`: they are watched.
    return (_pyio.open if WRITING.intersection(mode) else OPEN)(file, mode, *args, **options)


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

    def __init__(self, folder: Path, watch: Callable[[str, str], None]) -> None:
        self._folder, self._watch = f"{folder.resolve()}{os.sep}", watch
        self._opened: dict[int, str] = {}
        self._replacements = Replacements(
            {
                builtins.open: _open,
                io.FileIO: _pyio.FileIO,
                os.open: self._opening(os.open),
                os.write: self._writing(os.write),
                os.pwrite: self._writing(os.pwrite),
                os.fsync: self._watched("sync", os.fsync),
                os.rename: self._watched("rename", os.rename, 1, "dst_dir_fd"),
                os.replace: self._watched("rename", os.replace, 1, "dst_dir_fd"),
                os.unlink: self._watched("remove", os.unlink),
                os.remove: self._watched("remove", os.remove),
                os.mkdir: self._watched("create", os.mkdir),
            }
        )
        self.apply, self.undo = self._replacements.apply, self._replacements.undo

    def _show(self, kind: str, path: str) -> None:
        if f"{path}{os.sep}".startswith(self._folder):
            self._watch(kind, path)

    def _path_of(self, file: Any, folder: int | None = None) -> str:
        # The path of an open file, or a path with resolved folders; empty if it is unknown.
        file = file.fileno() if hasattr(file, "fileno") else file
        if isinstance(file, int):
            try:
                return os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115  # fast, called for each write
            except OSError:  # not on Linux, or closed
                return self._opened.get(file, "")
        base = "" if folder is None else self._path_of(folder)
        head, tail = os.path.split(os.path.join(base, os.fsdecode(file)))  # noqa: PTH118  # may be bytes
        return os.path.join(os.path.realpath(head or "."), tail)  # noqa: PTH118

    def _watched(
        self, kind: str, original: Callable[..., None], place: int = 0, folder: str = "dir_fd"
    ) -> Callable[..., None]:
        def operate(*args: Any, **options: Any) -> None:
            self._show(kind, self._path_of(args[place], options.get(folder)))
            original(*args, **options)

        return operate

    def _opening(self, original: Callable[..., int]) -> Callable[..., int]:
        def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
            where = self._path_of(path, options.get("dir_fd"))
            if flags & WRITES:
                self._show("create", where)
            file = original(path, flags, *args, **options)
            self._opened[file] = where
            return file

        return open_file

    def _writing(self, original: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, content: Any, *args: Any) -> int:
            try:
                self._show("write", self._path_of(file))
            except OSError:
                original(file, memoryview(content).cast("B")[: memoryview(content).nbytes // 2], *args)
                raise
            return original(file, content, *args)

        return write


class DiskFaults:
    """Faults whose event has occurred and that wait for their file operation."""

    def __init__(self, folder: Path, note: Callable[[int, str], None]) -> None:
        self._note = note
        self._waiting: dict[int, Fault] = {}
        self._seen = Counter[int]()  # operations since the event of each fault
        disk = WatchedDisk(folder, self._operate)
        disk.apply()
        self.close = disk.undo

    def add(self, number: int, fault: Fault) -> None:
        self._waiting[number] = fault

    def _operate(self, kind: str, path: str) -> None:
        for number, fault in [*self._waiting.items()]:
            self._seen[number] += 1
            since = self._seen[number] - max(1, fault.operation)  # operations since the first one that it affects
            if since < 0:
                continue
            if since == 0:
                self._note(number, f"{KINDS[fault.kind].text}, starting at {kind} {Path(path).name}")
            if since == fault.times - 1:
                del self._waiting[number]
            if fault.kind == "full-disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            if fault.kind == "slow-disk":
                time.sleep(fault.seconds)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
