"""Reports with checkpoints in Ray's storage."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any

from heliograph.spi import Entry, read_manifest, require

SUFFIX = ".pth"
RECORD = "checkpoint_manager_snapshot.json"  # Ray's
NAME = re.compile(r"checkpoint_(\d{6,})_(\w+)")


class StoredFolder:
    """The folder of a report in a storage, see `StoredReport`.

    Args:
        filesystem: the storage, as a file system of pyarrow.
        path: the folder in it.
        is_own: whether an earlier process of the same call reported it.
    """

    def __init__(self, filesystem: Any, path: str, *, is_own: bool) -> None:
        self.name, self.is_own = PurePosixPath(path).name, is_own
        self._filesystem, self._path = filesystem, path

    def manifests(self) -> dict[str, Entry | ValueError]:
        """Return the manifest of each checkpoint by file name, or why it cannot be used, from the ends of files."""
        manifests = dict[str, Entry | ValueError]()
        for each in _entries(self._filesystem, self._path):
            if each.base_name.endswith(SUFFIX):
                with self._filesystem.open_input_file(each.path) as file:
                    try:
                        manifests[each.base_name] = read_manifest(Path(each.base_name), source=file)
                    except ValueError as error:
                        manifests[each.base_name] = error
        return manifests

    def fetch(self, folder: Path) -> None:
        """Copy all files to a local folder.

        Raises:
            OSError: the storage cannot be read, or the disk not be written.
        """
        fs = _pyarrow_fs()
        target, local = str(folder.absolute()), fs.LocalFileSystem()
        fs.copy_files(self._path, target, source_filesystem=self._filesystem, destination_filesystem=local)


@dataclass(frozen=True, slots=True)
class ReportFolder:
    """The folder of a report, by its name.

    Attributes:
        filesystem: the storage.
        path: the folder.
        number: reports are numbered in their order.
        call: the id of the launcher's call that reported it.
    """

    filesystem: Any
    path: str
    number: int
    call: str


def report_name(number: int, call: str) -> str:
    """Return the name of the folder of a report."""
    return f"checkpoint_{number:06d}_{call}"


def list_reports(filesystem: Any, path: str) -> list[ReportFolder]:
    """Return the reports of a run in a storage, newest first, by their numbers."""
    matches = [(each.path, NAME.fullmatch(each.base_name)) for each in _entries(filesystem, path)]
    found = [ReportFolder(filesystem, path, int(match[1]), match[2]) for path, match in matches if match is not None]
    return sorted(found, key=lambda each: each.number, reverse=True)


def absolute_path(storage_path: str | Path) -> str:
    """Return the path of a storage for all processes: a relative path is resolved in this one."""
    path = str(storage_path)
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().absolute())


def check_storage_path(storage_path: str) -> None:
    """Create the folder of a storage if it is missing, and check that it can be written to.

    Args:
        storage_path: a folder or an address such as `s3://bucket`.

    Raises:
        OSError: it cannot be reached, created or written to.
        ValueError: pyarrow does not know this kind of storage.
    """
    fs = _pyarrow_fs()
    try:
        filesystem, path = fs.FileSystem.from_uri(storage_path)
        filesystem.create_dir(path)
        if isinstance(filesystem, fs.LocalFileSystem):
            TemporaryFile(dir=path).close()
    except ValueError as error:
        raise ValueError(
            f"storage_path={storage_path!r} is not a storage: {error}. Give a folder, or an address such as "
            f"'s3://bucket/folder'."
        ) from error
    except OSError as error:
        raise OSError(
            f"storage_path={storage_path!r} cannot be used: {error}. Give a folder that this process may write to, or "
            f"an address such as 's3://bucket/folder'."
        ) from error


def repair_record(storage_path: str, name: str) -> str | None:
    """Rename Ray's record of reports if it is damaged, because Ray would not start a run with it.

    Ray writes it in place, so a process that dies meanwhile leaves a part of it. Reports are found without it.

    Args:
        storage_path: a folder or an address such as `s3://bucket`.
        name: the name of the run in the storage.

    Returns:
        What was done; None if the record is intact, or missing.
    """
    filesystem, path = _pyarrow_fs().FileSystem.from_uri(storage_path)
    record = f"{path}/{name}/{RECORD}"
    if not filesystem.get_file_info(record).is_file:
        return None
    with filesystem.open_input_file(record) as file:
        content = bytes(file.readall())
    folders = {each.base_name for each in _entries(filesystem, f"{path}/{name}")}
    try:
        if all(each["checkpoint_dir_name"] in folders for each in json.loads(content)["checkpoint_results"]):
            return None
    except (ValueError, KeyError, TypeError):  # a part of it
        pass
    filesystem.move(record, f"{record}.damaged")
    return f"Ray's record of reports in {path}/{name} was damaged, and is now {RECORD}.damaged"


def _entries(filesystem: Any, path: str) -> list[Any]:
    """Return the contents of a folder; an empty list if there is no such folder."""
    return list(filesystem.get_file_info(_pyarrow_fs().FileSelector(path, allow_not_found=True)))


def _pyarrow_fs() -> Any:
    return require("pyarrow.fs", "Ray's storage", extra="ray")
