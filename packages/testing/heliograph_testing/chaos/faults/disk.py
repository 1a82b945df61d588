"""The operations on files of a folder, each shown to a function that may refuse it."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .replacements import Replacements

Watch = Callable[[str, str], None]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
WRITING = frozenset("wax+")
BUFFER = 8192  # bytes, as `open` has


class Disk:
    """Shows what changes files of a folder: create, write, sync, rename, remove.

    Covers this process, all threads: `open`, `io.FileIO`, `os.open`, and what has gone through these; of files that
    were open before, only `os.write`, `os.pwrite` and `os.fsync` on Linux. Does not cover memory maps and what C++ code
    writes by itself, as `torch.save` does when it is given a path.

    Args:
        folder: whose files, also in folders below it.
        watch: called with the kind and the path before each operation; what it raises, the operation raises. A write
            that is refused leaves half of what it was given.
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
        """Begin to show operations."""
        self._replacements.apply()

    def undo(self) -> None:
        """Let operations be as they were; files that are open stay shown."""
        self._replacements.undo()

    def show(self, kind: str, path: str | None) -> None:
        """Show an operation, if its file is in the folder."""
        if path is not None and f"{path}{os.sep}".startswith(self._folder):
            self._watch(kind, path)

    def path_of(self, file: int) -> str | None:
        """Return the path of an open file, None where it cannot be known."""
        try:
            return os.readlink(f"/proc/self/fd/{file}")  # noqa: PTH115  # for each write
        except OSError:  # no Linux, or it is closed
            return self._opened.get(file)

    def full_path(self, path: Any, folder: int | None = None) -> str | None:
        """Return a path from the root, with links in its folders followed."""
        if isinstance(path, int):
            return self.path_of(path)
        base = "" if folder is None else self.path_of(folder) or ""
        head, tail = os.path.split(os.path.join(base, os.fsdecode(path)))  # noqa: PTH118  # it may be bytes
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


def _watched_file(disk: Disk, write_some: Callable[..., int]) -> type[io.FileIO]:
    """Return a `FileIO` that shows its operations to a disk."""

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


def _opener(disk: Disk, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `open` whose writing files show their operations."""

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
        raw = io.FileIO(file, mode.replace("b", "").replace("t", ""), closefd, opener)  # the double, while it is there
        if buffering == 0:
            return raw
        size = BUFFER if buffering < 2 else buffering
        buffer: Any = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    return open_file
