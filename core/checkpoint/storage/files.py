"""File operations. A store calls them through the class `Files`, so that a test can record, fail or stop each one."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, FileIO
from math import ceil
from pathlib import Path
from time import sleep
from typing import Any, TypeVar
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo
from zlib import crc32

FOLLOW_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
_FLAGS: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.EISDIR}
T = TypeVar("T")
PAUSES = (0.1, 0.5, 2.0)  # seconds before reading is tried again
TRIES = 1 + len(PAUSES)
NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
logger = logging.getLogger("heliograph")


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file, or a symbolic link to one, for reading.

    Raises:
        ValueError: it is something else, such as a folder, a pipe or a device.
        OSError: it does not exist, or cannot be opened.
    """
    problem = ValueError(f"{path} is not a regular file: a folder, a link, a pipe or a device has that name")
    try:
        handle = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise problem from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise problem
    return os.fdopen(handle, "rb")


def read_range(path: Path | str, begin: int, most: int) -> tuple[bytes, int]:
    """Return up to `most` bytes of a regular file from a position, and the size of the file.

    A negative position is counted from the end.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(begin if begin >= 0 else max(0, size + begin))
        return file.read(most), size


def read_small(path: Path | str, most: int) -> bytes:
    """Return all of a regular file; raise ValueError if it is larger than `most` bytes."""
    content, size = read_range(path, 0, most)
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes, at most {most:,} are expected: it is not a file of heliograph")
    return content


def records_of(file: BufferedReader, path: Path) -> list[ZipInfo]:
    try:
        with ZipFile(file) as archive:
            return archive.infolist()
    except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        problem = "is empty" if file.seek(0, 2) == 0 else "is damaged, or was not written by torch.save"
        raise ValueError(f"{path} {problem}: {error}") from None


LARGE = 2**16  # bytes of a record whose content is verified by its CRC-32


def archive_digest(file: BufferedReader, size: int, path: Path, *, checks_data: bool) -> str:
    """Return the SHA-256 of an archive of torch, without the content of its large records and its last two bytes.

    The directory of the archive is covered and holds the CRC-32 of these records, so torch's own pass over the data of
    a save suffices. The digest identifies a checkpoint and detects any change outside the large records. The CRC-32
    detects any flipped bit and any burst in a large record, and all but one of 4 billion other damages.

    Args:
        file: the archive.
        size: how many bytes of the file are the archive, without its comment.
        path: for messages.
        checks_data: compare the large records with their CRC-32.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    digest, at, buffer = hashlib.sha256(), 0, memoryview(bytearray(2**18))

    def pieces(end: int) -> Iterator[memoryview]:
        nonlocal at
        file.seek(at)
        while at < end and (count := file.readinto(buffer[: min(end - at, len(buffer))])):
            at += count
            yield buffer[:count]
        if at != end:
            raise ValueError(f"{path} is damaged: the size of a record does not match the directory.")

    large = [item for item in records_of(file, path) if item.compress_type == ZIP_STORED and item.file_size >= LARGE]
    for record in sorted(large, key=lambda item: item.header_offset):
        file.seek(record.header_offset + 26)
        lengths = file.read(4)
        begin = record.header_offset + 30 + sum(int.from_bytes(part, "little") for part in (lengths[:2], lengths[2:]))
        for piece in pieces(begin):
            digest.update(piece)
        end, crc = begin + record.file_size, 0
        for piece in pieces(end) if checks_data else ():
            crc = crc32(piece, crc)
        if checks_data and crc != record.CRC:
            raise ValueError(f"{path} is damaged: the CRC-32 of its record {record.filename!r} does not match.")
        at = end
    for piece in pieces(size - 2):
        digest.update(piece)
    return digest.hexdigest()


class Files:
    """The file system. `sync` makes content durable, `sync_folder` makes names durable.

    Reading (`exists`, `read`, `read_range`, `digest`, `names`, and any function passed to `patiently`) is retried a few
    times, unless the file does not exist. Each of these uses one of the operations that begin with `try`.
    """

    def create(self, path: Path) -> FileIO:
        # a symbolic link of that name is not followed: another file would be emptied
        return FileIO(path, "w", opener=_open_no_link)

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        # the system may write less at a time
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[file.write(remaining) :]

    def date(self, file: FileIO, nanoseconds: int) -> None:
        with suppress(OSError):  # some file systems keep no times
            os.utime(file.name, ns=(nanoseconds, nanoseconds))

    def sync(self, file: FileIO) -> None:
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)

    def sync_folder(self, folder: Path) -> None:
        # Windows and some network file systems cannot sync a folder
        if not hasattr(os, "O_DIRECTORY"):
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def free(self, folder: Path) -> int:
        return shutil.disk_usage(folder).free

    def exists(self, path: Path) -> bool:
        try:
            self.patiently(partial(self.try_status, path))
        except NOT_THERE:
            return False
        return True

    def read(self, path: Path, most: int) -> bytes:
        return self.read_range(path, 0, most)[0]

    def read_range(self, path: Path, begin: int, most: int) -> tuple[bytes, int]:
        return self.patiently(partial(self.try_range, path, begin, most))

    def digest(self, path: Path) -> tuple[int, str]:
        def digest() -> tuple[int, str]:
            with self.try_open(path) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                return file.tell(), sha256

        return self.patiently(digest)

    def archive_digest(self, path: Path, size: int, *, checks_data: bool = True) -> str:
        def digest() -> str:
            with WatchedReader(self.try_open(path).detach()) as file, file.revealing():
                return archive_digest(file, size, path, checks_data=checks_data)

        return self.patiently(digest)

    def names(self, folder: Path) -> list[os.DirEntry[str]]:
        return self.patiently(partial(self.try_names, folder))

    def patiently(self, work: Callable[[], T]) -> T:
        for seconds in PAUSES:
            try:
                return work()
            except NOT_THERE:
                raise
            except OSError as error:
                logger.warning("reading failed, retrying in %s s: %s", seconds, error)
            self.pause(seconds)
        return work()

    def pause(self, seconds: float) -> None:
        sleep(seconds)

    def try_status(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def try_open(self, path: Path) -> BufferedReader:
        return open_regular(path)

    def try_range(self, path: Path, begin: int, most: int) -> tuple[bytes, int]:
        return read_range(path, begin, most)

    def try_names(self, folder: Path) -> list[os.DirEntry[str]]:
        with os.scandir(folder) as names:
            return list(names)


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | FOLLOW_NO_LINK, 0o666)


SYSTEM = Files()


def digest_of(path: Path) -> tuple[int, str]:
    return SYSTEM.digest(path)


class WatchedReader(BufferedReader):
    """A file that stores the error of the first failed read in `failure`, because torch and zipfile hide it."""

    failure: OSError | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        with self._watched():
            return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        with self._watched():
            return super().readinto(buffer)

    @contextmanager
    def revealing(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


PIECE = 2**20  # bytes: torch writes pieces of a few bytes
DIRECTORY, NEAR_END = b"PK\1\2", 128  # how the directory of an archive begins, and more bytes than follow it


class ArchiveWriter:
    """A file for `torch.save` that writes in larger pieces and computes the digest that `archive_digest` returns.

    Attributes:
        size: bytes so far.
        leaves_out: whether the digest excludes any record.
        failure: the error of the first failed write; torch raises its own instead.
    """

    def __init__(self, files: Files, file: FileIO) -> None:
        self.size, self.leaves_out = 0, False
        self.failure: BaseException | None = None
        self._files, self._file, self._piece = files, file, bytearray()
        self._digest = self._before = hashlib.sha256()
        self._last, self._directory, self._after = b"", b"", bytearray()

    def write(self, content: bytes | memoryview) -> int:
        if self.failure is not None:
            raise self.failure
        self._count(self._last)
        self._last = b""
        if len(content) < LARGE:
            self._last = bytes(content)
        else:  # a record, or the directory, which is near the end and a part of the digest
            self._before, self._after, self.leaves_out = self._digest.copy(), bytearray(), True
            self._directory = bytes(content) if content[:4] == DIRECTORY else b""
        self.size += len(content)
        if len(self._piece) + len(content) > PIECE:
            self.finish()
        if len(content) > PIECE:
            self._append(content)
        else:
            self._piece += content
        return len(content)

    def digest(self) -> str:
        if self._last[-2:] != b"\0\0":
            raise RuntimeError("this version of torch ends an archive in an unknown way")
        self._count(self._last[:-2])
        if self._directory and len(self._after) < NEAR_END:
            self._before.update(self._directory + self._after)
            return self._before.hexdigest()
        return self._digest.hexdigest()

    def end(self, comment: bytes) -> None:
        self._piece[-2:] = len(comment).to_bytes(2, "little")
        self._piece += comment
        self.finish()

    def flush(self) -> None: ...

    def finish(self) -> None:
        piece, self._piece = self._piece, bytearray()
        self._append(piece)

    def _count(self, content: bytes) -> None:
        self._digest.update(content)
        if len(self._after) < NEAR_END:
            self._after += content

    def _append(self, content: bytes | bytearray | memoryview) -> None:
        try:
            self._files.write(self._file, memoryview(content))
        except BaseException as error:
            self.failure = error
            raise


def megabytes(size: int, *, needed: bool = False) -> str:
    # needed space is rounded up and free space down, so that a lack shows
    return f"{(ceil(size / 1e5) if needed else size // 10**5) / 10:.1f} MB"


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file completely or not at all; an existing file of that name stays until then.

    Args:
        path: the file.
        write: writes the file at the path that it receives, in a hidden folder; other files that it writes there are
            moved to the folder of `path`, before the file itself.

    Raises:
        OSError: it could not be written; nothing remains of it.
    """
    hidden_folder = path.with_name(f".{path.name}.tmp")
    try:
        SYSTEM.remove_folder(hidden_folder)  # left by a killed process
        hidden_folder.mkdir()
        write(hidden_folder / path.name)
        names = sorted((entry.name for entry in hidden_folder.iterdir()), key=lambda name: name == path.name)
        for name in names:
            with FileIO(hidden_folder / name, "r+") as file:
                SYSTEM.sync(file)
        for name in names:
            SYSTEM.rename(hidden_folder / name, path.with_name(name))
        SYSTEM.sync_folder(path.parent)
    finally:
        SYSTEM.remove_folder(hidden_folder)


def prepare_folder(folder: Path) -> None:
    """Create a folder and write to it once, so that a run that cannot save fails at its start.

    Raises:
        ValueError: the path is a file, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name, or only for a moment: a kill leaves nothing
            pass
    except (FileExistsError, NotADirectoryError) as error:
        obstacle = next(path for path in (folder, *folder.parents) if path.exists() and not path.is_dir())
        raise ValueError(
            f"Nothing can be saved in {folder}: {obstacle} is not a folder. Choose another path."
        ) from error
    except OSError as error:
        raise ValueError(
            f"Nothing can be saved in {folder}: {error.strerror}. Choose a folder that this user may write."
        ) from error
