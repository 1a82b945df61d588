"""The checkpoints in a folder, listed in one pass; a manifest is read again only if its file has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import time_ns

from .files import SYSTEM, Files
from .manifest import MANIFEST, MOST, SUFFIX, Claim, Entry, MissingManifestError, claim_of, decode

STABLE = 10**9  # nanoseconds: a file that changed more recently may change again and keep its times
ROUNDS = 10  # the most passes, if files are removed meanwhile
Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A checkpoint in a folder, or a file with the name of one.

    Attributes:
        path: its data file.
        has_data: whether the data file exists; else only the manifest does.
        stamp: inode, size and times of the manifest.
        entry: the content of the manifest; None if it is missing or cannot be used.
        problem: why it cannot be used.
        claim: the run's name and the sequence in the manifest, damaged or not.
    """

    path: Path
    has_data: bool
    stamp: Stamp
    entry: Entry | None
    problem: OSError | ValueError | None = None
    claim: Claim | None = None


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

    def look(self) -> list[FoundFile]:
        """Return the checkpoints that there are now, sorted by name; none if the folder does not exist.

        Raises:
            OSError: the folder cannot be read.
        """
        if self._is_steady:
            return self.seen
        self.listed = {}
        for rounds in reversed(range(ROUNDS)):
            try:
                self.seen = self._look(is_last=rounds == 0)
            except _VanishedError:  # removed by another process
                continue
            break
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

    def _look(self, *, is_last: bool) -> list[FoundFile]:
        data, stamps = self._names()
        known, self._known = self._known, {}
        stable = time_ns() - STABLE
        found = []
        for stem in sorted(data | stamps.keys()):
            stamp, has_data, each = stamps.get(stem, ()), stem in data, known.get(stem)
            if each is None or each.stamp != stamp or each.has_data != has_data:
                each = self._read(stem, has_data, stamp, is_last=is_last)
            if stamp and max(stamp[2:]) < stable and not isinstance(each.problem, OSError):
                self._known[stem] = each
            found.append(each)
        return found

    def _names(self) -> tuple[set[str], dict[str, Stamp]]:
        """Return the names of data files without suffix, and the stamps of manifests by the same names."""
        data, stamps = set[str](), dict[str, Stamp]()
        try:
            names = self.files.names(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return data, stamps
        for each in names:
            if each.name.startswith("."):
                continue
            if each.name.endswith(SUFFIX) and not _is_folder(each):
                data.add(each.name.removesuffix(SUFFIX))
            elif each.name.endswith(MANIFEST):
                stamps[each.name.removesuffix(MANIFEST)] = _stamp(each)
        return data, stamps

    def _read(self, stem: str, has_data: bool, stamp: Stamp, *, is_last: bool) -> FoundFile:
        path, place = self.folder / f"{stem}{SUFFIX}", self.folder / f"{stem}{MANIFEST}"
        try:
            is_patient = has_data and stem not in self._refused
            content = self.files.read(place, MOST) if is_patient else self.files.try_read(place, MOST)
        except FileNotFoundError:
            if stamp and not is_last:
                raise _VanishedError from None
            return FoundFile(path, has_data, stamp, None, MissingManifestError(path))
        except (OSError, ValueError) as error:
            self._refused.add(stem)
            return FoundFile(path, has_data, stamp, None, error)
        try:
            entry = decode(content, place, path)
        except ValueError as error:
            return FoundFile(path, has_data, stamp, None, error, claim_of(content))
        if entry.path is not path:  # a pair may have been renamed
            entry = replace(entry, path=path, is_renamed=True)
        return FoundFile(path, has_data, stamp, entry, None, entry.claim)


class _VanishedError(Exception):
    """A manifest was listed, but does not exist any more."""


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
