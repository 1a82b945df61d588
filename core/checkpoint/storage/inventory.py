"""The checkpoints in a folder, listed by their manifests."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple

from ....events.checks import known_names
from .files import SYSTEM, Files, read_small
from .manifest import SUFFIX, Entry, MissingManifestError, clean, run_part

if TYPE_CHECKING:
    from .untrusted_files import Head

ROUNDS = 10  # the most passes, if files are removed meanwhile
LONGEST_NAME = 255  # bytes, on most file systems
LAST = ".last"  # how the pointer to the newest checkpoint of a training ends
SHORTEST = 80  # bytes at the beginning of a run's name that the names of all its files have
Stamp = tuple[int, ...]


class FoundFile(NamedTuple):
    """A file in a folder that is a checkpoint, or has the name of one.

    Attributes:
        path: its path.
        stamp: inode, size and times.
        entry: its manifest; None if it is missing or cannot be used.
        problem: why it cannot be used.
        head: the run and training of a file whose manifest cannot be used, read from its beginning.
    """

    path: Path
    stamp: Stamp
    entry: Entry | None
    problem: OSError | ValueError | None = None
    head: Head | None = None

    @property
    def run_name(self) -> str | None:
        if self.entry is not None:
            return self.entry.family
        return self.head and self.head.run_name


class Manifests:
    """The checkpoints in a folder; a manifest is read again only if its file changed."""

    def __init__(self, folder: Path, files: Files = SYSTEM) -> None:
        self.folder, self.files = folder, files
        self._stamps: dict[str, Stamp] = {}
        self._cache: dict[str, FoundFile] = {}
        self._recent: dict[str, list[FoundFile]] = {}  # by the name of a run
        self._is_steady = False

    def names(self, *, again: bool = False) -> dict[str, Stamp]:
        # stamps of checkpoints and pointers by name; within `steady`, from the last listing
        if again or not self._is_steady:
            try:
                names = self.files.names(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                names = []
            visible = (item for item in names if item.name.endswith((SUFFIX, LAST)) and not item.name.startswith("."))
            self._stamps = {item.name: stamp for item in visible if (stamp := _stamp(item)) is not None}
            self._cache = {name: file for name, file in self._cache.items() if self._is_unchanged(file)}
            self._recent = {}
        return self._stamps

    def look(self, is_chosen: Callable[[str], bool] = bool, *, again: bool = False) -> list[FoundFile]:
        for number in range(ROUNDS):
            names = self.names(again=again or number > 0)
            chosen = [name for name in names if is_chosen(name) and name.endswith(SUFFIX)]
            files = [self._find(name) for name in sorted(chosen, key=lambda name: name.removesuffix(SUFFIX))]
            if None not in files:
                break  # otherwise a file was removed or renamed since it was listed
        return [file for file in files if file is not None]

    def may_be_of(self, run_name: str) -> Callable[[str], bool]:
        # by its file name: it has the run's prefix, or was renamed
        prefix = clean(run_name, SHORTEST) if run_part(run_name) == run_name else ""
        return lambda name: name.startswith(prefix) or "_epoch_" not in name

    def recent(self, run_name: str) -> list[FoundFile]:
        """Return the files that may be the newest checkpoint of a run: targets of its pointers, and newer files.

        A pointer is a hint: it may name an older checkpoint than the newest. But a store writes its files with
        increasing times, so a newer file has a later time. Without a usable pointer, all files that may be of the run
        are read.
        """
        with self.steady():
            if run_name not in self._recent:
                self._recent[run_name] = self._look_recent(run_name)
            return self._recent[run_name]

    def _look_recent(self, run_name: str) -> list[FoundFile]:
        stamps, may_be_of = self.names(), self.may_be_of(run_name)
        pointer = re.compile(rf"{re.escape(run_part(run_name))}(-\d+)*{re.escape(LAST)}")
        named = {read_pointer(self.folder / name) for name in stamps if pointer.fullmatch(name)}
        entries = [file.entry for file in self.look(named.__contains__) if file.entry and file.run_name == run_name]
        if not entries:
            return self.look(may_be_of)
        newest = max(entries, key=lambda entry: entry.order)
        since = min([*stamps[newest.path.name][2:], int(newest.saved_at * 1e9)])
        later = {name for name, stamp in stamps.items() if max(stamp[2:], default=since) >= since}
        return self.look(lambda name: name in named or (name in later and may_be_of(name)))

    @contextmanager
    def steady(self) -> Iterator[None]:
        self.names()
        was_steady, self._is_steady = self._is_steady, True
        try:
            yield
        finally:
            self._is_steady = was_steady

    def _is_unchanged(self, file: FoundFile) -> bool:
        is_known = bool(file.stamp) and self._stamps.get(file.path.name) == file.stamp
        return is_known and not isinstance(file.problem, OSError)

    def _find(self, name: str) -> FoundFile | None:
        file = self._cache.get(name) or self._read(name, self._stamps[name])
        if file is not None:
            self._cache[name] = file
        return file

    def _read(self, name: str, stamp: Stamp) -> FoundFile | None:
        from .untrusted_files import read_entry, read_head  # imported when a folder has a checkpoint

        path = self.folder / name
        try:
            return FoundFile(path, stamp, read_entry(lambda most: self.files.read_range(path, -most, most), path))
        except FileNotFoundError:
            if not path.is_symlink():
                return None
            problem = f"it is a broken link to {path.readlink()}"
            if "_epoch_" in name:  # perhaps into storage that is not mounted
                return FoundFile(path, stamp, None, OSError(errno.EIO, problem, str(path)))
            return FoundFile(path, stamp, None, ValueError(f"{path} cannot be read: {problem}"))
        except ValueError as error:
            return FoundFile(path, stamp, None, error, read_head(path))
        except OSError as error:
            return FoundFile(path, stamp, None, error)


def read_pointer(pointer: Path) -> str | None:
    try:
        return read_small(pointer, LONGEST_NAME + 1).decode().removesuffix("\n")
    except (OSError, ValueError):
        return None


def _stamp(entry: os.DirEntry[str]) -> Stamp | None:
    # () if they cannot be read, None for a folder
    try:
        if entry.is_dir():
            return None
        status = entry.stat()
    except OSError:  # a link to itself, for example
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


Scope = Literal["recent", "run"]
SHOWN = 5  # names of other runs in a message: a hyperparameter search may have hundreds


class OtherRunsNote(str):
    """A message about checkpoints of other runs: a note, not a warning."""

    __slots__ = ()


def read_manifest(path: Path, *, source: BinaryIO | None = None, files: Files = SYSTEM) -> Entry:
    """Return the entry in the manifest of a checkpoint, without reading its data.

    Args:
        path: the checkpoint.
        source: the file, opened for reading, if it is in another storage; its end is read.
        files: the operations on files.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: there is no manifest, it is damaged, or it has another schema.
    """
    from .untrusted_files import read_entry  # imported when there is a checkpoint to read

    if source is not None:
        opened, size = source, source.seek(0, SEEK_END)

        def read(most: int) -> tuple[bytes, int]:
            opened.seek(max(0, size - most))
            return opened.read(), size

        return read_entry(read, path)
    try:
        return read_entry(lambda most: files.read_range(path, -most, most), path)
    except (OSError, ValueError):
        if not path.name.startswith("."):
            check_is_there(path)  # its message is clearer
        raise


def entries(folder: Path | Manifests, run_name: str, scope: Scope = "run") -> tuple[list[Entry], list[str]]:
    """Return the checkpoints of a run, newest first, and a message for each skipped file.

    Only manifests are read; `verify` reads the data. Checkpoints of other runs are mentioned only if this run has
    none.

    Args:
        folder: the folder.
        run_name: the name that the program gave the run.
        scope: which manifests are read: `recent`, files that may be the newest checkpoints of the run; `run`, files
            that may be of the run by their file names.

    Raises:
        OSError: the folder cannot be read.
    """
    manifests = manifests_in(folder)
    candidates = files_of(manifests, run_name, scope)
    of_run = [file.entry for file in candidates if file.entry is not None and file.run_name == run_name]
    passed_over = [str(file.problem) for file in candidates if file.entry is None and not _is_foreign(file)]
    if not of_run and (of_others := _other_runs_note(manifests, run_name)):
        passed_over.append(of_others)
    return sorted(of_run, key=lambda entry: entry.order, reverse=True), passed_over


def _is_foreign(file: FoundFile) -> bool:
    # for example exported weights
    return isinstance(file.problem, MissingManifestError) and "_epoch_" not in file.path.name


def files_of(manifests: Manifests, run_name: str, scope: Scope) -> list[FoundFile]:
    if scope == "recent":
        return manifests.recent(run_name)
    return manifests.look(manifests.may_be_of(run_name))


def _other_runs_note(manifests: Manifests, run_name: str) -> OtherRunsNote | None:
    names = {name.partition("_epoch_")[0]: name for name in sorted(manifests.names()) if name.endswith(SUFFIX)}
    shown = {*[*names.values()][: SHOWN + 1]}
    families = sorted({file.entry.family for file in manifests.look(shown.__contains__) if file.entry} - {run_name})
    if not families:
        return None
    more = len(names) - SHOWN
    listed = ", ".join(map(repr, families[:SHOWN])) + f" and {more} more" * (more > 0)
    return OtherRunsNote(f"{manifests.folder} has no checkpoint of run {run_name!r}, only of {listed}.")


def under(folder: Path | Manifests, run_name: str, name: str) -> tuple[list[Entry], list[FoundFile], int]:
    manifests = manifests_in(folder)
    number = sum(_is_named_after(name, file) for file in manifests.names())
    for look in (partial(manifests.recent, run_name), partial(files_of, manifests, name, "run")):
        files = look()
        entries = (file.entry for file in files if file.entry is not None)
        of_training = [entry for entry in entries if entry.run_name == name and not entry.is_renamed]
        unreadable = [file for file in files if file.entry is None and _is_named_after(name, file.path.name)]
        if of_training or len(unreadable) == number:
            break
    return of_training, unreadable, max(number, len(of_training) + len(unreadable))


def lost(folder: Path | Manifests, run_name: str, scope: Scope = "run") -> list[FoundFile]:
    candidates = files_of(manifests_in(folder), run_name, scope)
    return [file for file in candidates if file.head is not None and file.head.run_name == run_name]


def highest_sequence(candidates: Iterable[FoundFile], run_name: str) -> int:
    # at least 0: checkpoints of Helios have negative numbers
    return max([0, *(file.entry.sequence for file in candidates if file.entry and file.run_name == run_name)])


def unreadable_notes(candidates: Iterable[FoundFile]) -> list[str]:
    unknown = "its run and its position in the order of writing are unknown"
    unreadable = (file for file in candidates if isinstance(file.problem, OSError))
    return [f"{file.path} cannot be read ({file.problem}): {unknown}" for file in unreadable]


def manifests_in(folder: Path | Manifests) -> Manifests:
    return folder if isinstance(folder, Manifests) else Manifests(folder)


def _is_named_after(run_name: str, name: str) -> bool:
    return name.endswith(SUFFIX) and name.startswith(f"{run_part(run_name)}_epoch_")


def check_is_there(path: Path) -> None:
    if path.is_symlink() and not path.exists():  # perhaps into storage that is not mounted
        raise OSError(errno.EIO, f"it is a broken link to {path.readlink()}", str(path))
    if path.is_dir():
        raise ValueError(f"{path} is a folder: Checkpoint({str(path)!r}, resume='auto') finds the newest in it.")
    if not path.exists():
        siblings = [file.name for file in path.parent.glob(f"*{SUFFIX}")] if path.parent.is_dir() else []
        raise FileNotFoundError(f"There is no checkpoint at {path}.{known_names(path.name, siblings)}")
