"""The file operations of a store, in sight of who kills it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

from heliograph.core.checkpoint import storage


class WatchedFiles(storage.Files):
    """Shows every operation that a store makes to somebody.

    Args:
        operation: called with the name of each, such as `rename data.tmp`, which happens within what it returns.
    """

    def __init__(self, operation: Callable[[str], AbstractContextManager[None]]) -> None:
        self.operation = operation

    def create(self, path: Path) -> FileIO:
        """Show and create."""
        with self.operation(f"create {kind_of(path)}"):
            return super().create(path)

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        """Show and write."""
        with self.operation(f"write {kind_of(Path(str(file.name)))}"):
            super().write(file, content)

    def sync(self, file: FileIO) -> None:
        """Show and sync."""
        with self.operation(f"sync {kind_of(Path(str(file.name)))}"):
            super().sync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Show and rename."""
        with self.operation(f"rename {kind_of(old)}"):
            super().rename(old, new)

    def unlink(self, path: Path) -> None:
        """Show and unlink."""
        with self.operation(f"unlink {kind_of(path)}"):
            super().unlink(path)

    def sync_folder(self, folder: Path) -> None:
        """Show and sync."""
        with self.operation("sync folder"):
            super().sync_folder(folder)


def kind_of(path: Path) -> str:
    """Return what a file is, whatever its name: `data`, `pointer`, or the end of `.<run>.data.tmp`."""
    if path.name.startswith("."):
        return path.name.split(".", 2)[-1]
    return "data" if path.suffix == ".pth" else "pointer"
