"""The checkpoints in a folder, listed in one pass; a manifest is read again only if its file has changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from .archive import Head, read_head
from .files import SYSTEM, Files
from .manifest import SUFFIX, Entry, decode

STABLE = 10**9  # nanoseconds: a file that changed more recently may change again and keep its times
ROUNDS = 10  # the most passes, if files are removed meanwhile
Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A checkpoint in a folder, or a file with the name of one.

    Attributes:
        path: where it is.
        stamp: inode, size and times.
        entry: its manifest; None if it is missing or cannot be used.
        problem: why it cannot be used.
        head: whose it is by its beginning, if the manifest cannot be used.
    """

    path: Path
    stamp: Stamp
    entry: Entry | None
    problem: OSError | ValueError | None = None
    head: Head | None = None

    @property
    def run_name(self) -> str | None:
        """The name that the program gave the run; None if it is not known."""
        known = self.head and self.head.run_name
        return known if self.entry is None else self.entry.family


class Manifests:
    """The checkpoints in a folder; manifests that have not changed are read once.

    Args:
        folder: the folder.
        files: the operations on files.

    Attributes:
        seen: what the last `look` found.
        listed: the checkpoints of a run in `seen`, by its name, for `reader.entries`.
    """

    def __init__(self, folder: Path, files: Files = SYSTEM) -> None:
        self.folder, self.files = folder, files
        self.seen: list[FoundFile] = []
        self.listed: dict[str, tuple[list[Entry], list[str]]] = {}
        self._known: dict[str, FoundFile] = {}
        self._refused: set[str] = set()  # could not be read: not retried again
        self._is_steady = False

    def look(self, *, again: bool = False) -> list[FoundFile]:
        """Return the checkpoints that there are now, sorted by name; none if the folder does not exist.

        Args:
            again: even within `steady`.

        Raises:
            OSError: the folder cannot be read.
        """
        if self._is_steady and not again:
            return self.seen
        self.listed = {}
        for _ in range(ROUNDS):
            found = self._look()
            if None not in found:
                break  # else a file was removed since it was listed, or has another name by now
        self.seen = [each for each in found if each is not None]
        return self.seen

    @contextmanager
    def steady(self, *, looks: bool = True) -> Iterator[None]:
        """Look once, or with `looks=False` not again, and use that: with 10,000 checkpoints, a look takes 0.1 s."""
        if looks:
            self.look()
        self._is_steady = True
        try:
            yield
        finally:
            self._is_steady = False

    def look_again(self) -> None:
        """Make the next `look` read the folder again."""
        self._is_steady = False

    def _look(self) -> list[FoundFile | None]:
        stamps = self._names()
        known, self._known = self._known, {}
        stable = time_ns() - STABLE
        found = list[FoundFile | None]()
        for name in sorted(stamps, key=lambda name: name.removesuffix(SUFFIX)):
            stamp, each = stamps[name], known.get(name)
            if each is None or each.stamp != stamp:
                each = self._read(name, stamp)
            if each is not None and stamp and max(stamp[2:]) < stable and not isinstance(each.problem, OSError):
                self._known[name] = each
            found.append(each)
        return found

    def _names(self) -> dict[str, Stamp]:
        """Return the stamps of checkpoints by name."""
        try:
            names = self.files.names(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        visible = (each for each in names if each.name.endswith(SUFFIX) and not each.name.startswith("."))
        return {each.name: _stamp(each) for each in visible if not _is_folder(each)}

    def _read(self, name: str, stamp: Stamp) -> FoundFile | None:
        path = self.folder / name
        try:
            content, begin = self.files.try_tail(path) if name in self._refused else self.files.read_tail(path)
            return FoundFile(path, stamp, decode(content, path, begin))
        except FileNotFoundError:
            if not path.is_symlink():
                return None
            problem = f"it is a link to {path.readlink()}, which is not there"
            if "_epoch_" in name:  # into storage that is not mounted, perhaps: it may come back
                return FoundFile(path, stamp, None, OSError(errno.EIO, problem, str(path)))
            return FoundFile(path, stamp, None, ValueError(f"{path} cannot be read: {problem}"))
        except ValueError as error:
            return FoundFile(path, stamp, None, error, read_head(path))
        except OSError as error:
            self._refused.add(name)
            return FoundFile(path, stamp, None, error)


def _is_folder(each: os.DirEntry[str]) -> bool:
    try:
        return each.is_dir()
    except OSError:  # a link to itself
        return False


def _stamp(each: os.DirEntry[str]) -> Stamp:
    """Return inode, size and times of a file, which change with it; nothing if they cannot be read."""
    try:
        status = each.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
