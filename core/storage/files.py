"""The operations on files that a store is made of: one seam, so that a test can record, refuse or stop each of them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from io import FileIO
from pathlib import Path


class Files:
    """The real file system. Nothing is durable before its `sync`, no name before its folder's."""

    def create(self, path: Path) -> FileIO:
        """Open a new, unbuffered file, emptied where there was one; its permissions are what the umask says."""
        return FileIO(path, "w")

    def write(self, file: FileIO, content: bytes | memoryview) -> None:
        """Append all of `content`: the system may take less at a time."""
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: FileIO) -> None:
        """Make a file's content durable."""
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name in the same folder, in the place of whatever had it."""
        old.replace(new)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with the files in it, if it is there."""
        if path.exists():
            shutil.rmtree(path)

    def sync_folder(self, folder: Path) -> None:
        """Make names in a folder durable, where that can be asked for: not of Windows, nor of some network's files."""
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
        """Return the bytes that this user may still write there."""
        return shutil.disk_usage(folder).free


def digest_of(path: Path) -> tuple[int, str]:
    """Return the size of a file, and its SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256


class HashingWriter:
    """What `torch.save` writes into: a file, whose digest is known when its last byte is written.

    Attributes:
        size: bytes so far.
        failure: what the first failed write raised; torch hides it behind an error of its own.
    """

    def __init__(self, files: Files, file: FileIO) -> None:
        self.size = 0
        self.failure: BaseException | None = None
        self._files, self._file, self._digest = files, file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        """Append and digest; once a write has failed, every other fails alike."""
        if self.failure is not None:
            raise self.failure
        try:
            self._files.write(self._file, content)
        except BaseException as error:
            self.failure = error
            raise
        self._digest.update(content)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Do nothing: the file is unbuffered."""

    def sha256(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


def prepare_folder(folder: Path) -> None:
    """Make a folder and try it, so that a run does not find out hours later that it cannot save.

    Raises:
        ValueError: the path is a file, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name, or only for a moment: a kill leaves nothing behind
            pass
    except OSError as error:
        raise ValueError(
            f"Nothing can be saved in {folder}: {error.strerror}. Choose a folder that this user may write."
        ) from error
