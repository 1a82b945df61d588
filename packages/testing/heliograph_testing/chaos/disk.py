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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .fault import KINDS, Fault

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRITING = frozenset("wax+")
OPEN = builtins.open


@contextmanager
def replaced(doubles: Mapping[Any, Any]) -> Iterator[None]:
    """Replace functions and classes by doubles in every loaded module."""
    by_id = {id(original): double for original, double in doubles.items()}
    modules = [module for name, module in sys.modules.items() if isinstance(module, ModuleType) and name != __name__]
    places = [
        (vars(module), name, value) for module in modules for name, value in vars(module).items() if id(value) in by_id
    ]
    for names, name, original in places:
        names[name] = by_id[id(original)]
    try:
        yield
    finally:
        for names, name, original in places:
            names[name] = original


class JumpingClock:
    """Doubles of `time.time` and `time.time_ns` that are off; `time.monotonic` and file times do not change."""

    def __init__(self) -> None:
        self.offset = 0.0
        now, now_ns = time.time, time.time_ns
        self.doubles = {now: lambda: now() + self.offset, now_ns: lambda: now_ns() + int(self.offset * 1e9)}


def _open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    # The implementation of `io` in Python, which writes by `os.open` and `os.write`: they are watched.
    return (_pyio.open if WRITING.intersection(mode) else OPEN)(file, mode, *args, **options)


class WatchedDisk:
    """Doubles of operations that change files of a folder: create, write, sync, rename, remove.

    They cover all threads of this process: `open`, `io.FileIO`, `os.open`, and files opened by them. For files that
    were open before, only `os.write`, `os.pwrite` and `os.fsync`. They do not cover memory maps and files that C++ code
    writes, for example `torch.save` with a path. Writes and syncs are covered on Linux.

    Args:
        folder: the folder, including its subfolders.
        watch: called with the kind and the path before each operation. The operation raises its errors; a refused write
            writes half of its content.
    """

    def __init__(self, folder: Path, watch: Callable[[str, str], None]) -> None:
        self._folder, self._watch = f"{folder.resolve()}{os.sep}", watch
        self.doubles = {
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

    def _show(self, kind: str, path: str) -> None:
        if f"{path}{os.sep}".startswith(self._folder):
            self._watch(kind, path)

    def _watched(
        self, kind: str, original: Callable[..., None], place: int = 0, folder: str = "dir_fd"
    ) -> Callable[..., None]:
        def operate(*args: Any, **options: Any) -> None:
            self._show(kind, _path_of(args[place], options.get(folder)))
            original(*args, **options)

        return operate

    def _opening(self, original: Callable[..., int]) -> Callable[..., int]:
        def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & WRITES:
                self._show("create", _path_of(path, options.get("dir_fd")))
            return original(path, flags, *args, **options)

        return open_file

    def _writing(self, original: Callable[..., int]) -> Callable[..., int]:
        def write(file: int, content: Any, *args: Any) -> int:
            try:
                self._show("write", _path_of(file))
            except OSError:
                original(file, memoryview(content).cast("B")[: memoryview(content).nbytes // 2], *args)
                raise
            return original(file, content, *args)

        return write


def _path_of(file: Any, folder: int | None = None) -> str:
    # The path of an open file, or a path with resolved folders; empty if it is unknown.
    file = file.fileno() if hasattr(file, "fileno") else file
    if isinstance(file, int):
        try:
            return os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115  # fast, called for each write
        except OSError:  # not on Linux, or closed
            return ""
    base = "" if folder is None else _path_of(folder)
    head, tail = os.path.split(os.path.join(base, os.fsdecode(file)))  # noqa: PTH118  # may be bytes
    return os.path.join(os.path.realpath(head or "."), tail)  # noqa: PTH118


class DiskFaults:
    """Faults whose event has occurred and that wait for their file operation; `operate` watches a disk."""

    def __init__(self, note: Callable[[int, str], None]) -> None:
        self._note = note
        self._waiting: dict[int, Fault] = {}
        self._seen = Counter[int]()  # operations since the event of each fault

    def add(self, number: int, fault: Fault) -> None:
        self._waiting[number] = fault

    def operate(self, kind: str, path: str) -> None:
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
