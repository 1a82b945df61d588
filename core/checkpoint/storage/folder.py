"""The checkpoints in a folder, listed in one pass; manifests are read when needed, and again if the file changed."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from .archive import Head, read_head
from .files import SYSTEM, Files
from .manifest import SUFFIX, Entry, clean, read_entry, run_part
from .untrusted_files import read_small

STABLE = 10**9  # nanoseconds: a file that changed more recently may change again and keep its times
ROUNDS = 10  # the most passes, if files are removed meanwhile
LONGEST_NAME = 255  # bytes, on most file systems
LAST = ".last"  # how the pointer to the newest checkpoint of a training ends
SHORTEST = 80  # bytes at the beginning of a run's name that the names of all its files have
Stamp = tuple[int, ...]


class FoundFile(NamedTuple):
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
    """

    def __init__(self, folder: Path, files: Files = SYSTEM) -> None:
        self.folder, self.files = folder, files
        self._stamps: dict[str, Stamp] = {}
        self._listed_at = 0
        self._known: dict[str, FoundFile] = {}
        self._recent: dict[str, list[FoundFile]] = {}  # by the name of a run
        self._refused: set[str] = set()  # could not be read: not retried again
        self._is_steady = False

    def names(self, *, again: bool = False) -> dict[str, Stamp]:
        """Return the stamps of checkpoints and pointers by name: as they are now or, within `steady`, were.

        Raises:
            OSError: the folder cannot be read.
        """
        if again or not self._is_steady:
            try:
                names = self.files.names(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                names = []
            visible = (each for each in names if each.name.endswith((SUFFIX, LAST)) and not each.name.startswith("."))
            self._stamps = {each.name: stamp for each in visible if (stamp := _stamp(each)) is not None}
            stable, self._listed_at = self._listed_at - STABLE, time_ns()
            self._known = {name: each for name, each in self._known.items() if self._is_unchanged(each, stable)}
            self._recent = {}
        return self._stamps

    def look(self, is_chosen: Callable[[str], bool] = bool, *, again: bool = False) -> list[FoundFile]:
        """Return the checkpoints in the folder, sorted by name; none if it does not exist.

        Args:
            is_chosen: which to return, by name; the manifests of others are not read.
            again: list the folder even within `steady`.

        Raises:
            OSError: the folder cannot be read.
        """
        for number in range(ROUNDS):
            names = self.names(again=again or number > 0)
            chosen = [name for name in names if is_chosen(name) and name.endswith(SUFFIX)]
            found = [self._find(name) for name in sorted(chosen, key=lambda name: name.removesuffix(SUFFIX))]
            if None not in found:
                break  # else a file was removed since it was listed, or has another name by now
        return [each for each in found if each is not None]

    def may_be_of(self, run_name: str) -> Callable[[str], bool]:
        """Return whether a file may be a checkpoint of a run, by its name: it has the run's, or was renamed."""
        prefix = clean(run_name, SHORTEST) if run_part(run_name) == run_name else ""
        return lambda name: name.startswith(prefix) or "_epoch_" not in name

    def recent(self, run_name: str) -> list[FoundFile]:
        """Return the files that may be the newest checkpoint of a run: those that its pointers name, and newer ones.

        A pointer is a hint: it may name an older checkpoint than the newest. But a store gives its files times in the
        order of writing, so that a newer one has a later time. Without a usable pointer, all files are read that may
        be of the run.
        """
        with self.steady():
            if run_name not in self._recent:
                self._recent[run_name] = self._look_recent(run_name)
            return self._recent[run_name]

    def _look_recent(self, run_name: str) -> list[FoundFile]:
        stamps, may_be_of = self.names(), self.may_be_of(run_name)
        pointer = re.compile(rf"{re.escape(run_part(run_name))}(-\d+)*{re.escape(LAST)}")
        named = {read_pointer(self.folder / name) for name in stamps if pointer.fullmatch(name)}
        entries = [each.entry for each in self.look(named.__contains__) if each.entry and each.run_name == run_name]
        if not entries:
            return self.look(may_be_of)
        newest = max(entries, key=lambda entry: entry.order)
        since = min([*stamps[newest.path.name][2:], int(newest.saved_at * 1e9)])
        later = {name for name, stamp in stamps.items() if max(stamp[2:], default=since) >= since}
        return self.look(lambda name: name in named or (name in later and may_be_of(name)))

    @contextmanager
    def steady(self, *, looks: bool = True) -> Iterator[None]:
        """List the folder once, or with `looks=False` not again, and use that."""
        if looks:
            self.names()
        was_steady, self._is_steady = self._is_steady, True
        try:
            yield
        finally:
            self._is_steady = was_steady

    def _is_unchanged(self, each: FoundFile, stable: int) -> bool:
        """Return whether a file is the one that was read, at a time from which on it cannot have changed unseen."""
        is_known = bool(each.stamp) and self._stamps.get(each.path.name) == each.stamp
        return is_known and max(each.stamp[2:]) < stable and not isinstance(each.problem, OSError)

    def _find(self, name: str) -> FoundFile | None:
        found = self._known.get(name) or self._read(name, self._stamps[name])
        if found is not None:
            self._known[name] = found
        return found

    def _read(self, name: str, stamp: Stamp) -> FoundFile | None:
        path = self.folder / name
        try:
            read = self.files.try_range if name in self._refused else self.files.read_range
            return FoundFile(path, stamp, read_entry(lambda most: read(path, -most, most), path))
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


def read_pointer(pointer: Path) -> str | None:
    """Return the file name in a pointer; None if it is missing or not a regular, small file."""
    try:
        return read_small(pointer, LONGEST_NAME + 1, follow=False).decode().removesuffix("\n")
    except (OSError, ValueError):
        return None


def _stamp(each: os.DirEntry[str]) -> Stamp | None:
    """Return inode, size and times of a file, which change with it; () if they cannot be read, None for a folder."""
    try:
        if each.is_dir():
            return None
        status = each.stat()
    except OSError:  # a link to itself, for example
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
