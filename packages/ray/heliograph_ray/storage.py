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


@dataclass
class StoredFolder:
    """The folder of a report in the storage, with checkpoints and their shards.

    Attributes:
        filesystem: the storage, as a file system of pyarrow.
        path: the folder in it.
        is_own: whether an earlier process of the same call reported it. A restarted run resumes such a report whatever
            `resume=` of its `Checkpoint` is.
        number: the launcher numbers its reports in order.
        call: the id of the launcher's call that reported it.
    """

    filesystem: Any
    path: str
    is_own: bool = False
    number: int = 0
    call: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def manifests(self) -> dict[str, Entry | ValueError]:
        """Return the manifest of each checkpoint by file name, or its error, without copying the files."""
        manifests = dict[str, Entry | ValueError]()
        for entry in list_entries(self.filesystem, self.path):
            if entry.base_name.endswith(SUFFIX):
                with self.filesystem.open_input_file(entry.path) as file:
                    try:
                        manifests[entry.base_name] = read_manifest(Path(entry.base_name), source=file)
                    except ValueError as error:
                        manifests[entry.base_name] = error
        return manifests

    def fetch(self, folder: Path) -> None:
        fs = _pyarrow_fs()
        target, local = str(folder.absolute()), fs.LocalFileSystem()
        fs.copy_files(self.path, target, source_filesystem=self.filesystem, destination_filesystem=local)


def report_name(number: int, call: str) -> str:
    return f"checkpoint_{number:06d}_{call}"


def list_reports(filesystem: Any, path: str) -> list[StoredFolder]:
    reports = [
        StoredFolder(filesystem, entry.path, number=int(match[1]), call=match[2])
        for entry in list_entries(filesystem, path)
        if (match := NAME.fullmatch(entry.base_name))
    ]
    return sorted(reports, key=lambda report: report.number, reverse=True)


def absolute_path(storage_path: str | Path) -> str:
    path = str(storage_path)
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().absolute())


def check_storage_path(storage_path: str) -> None:
    fs = _pyarrow_fs()
    try:
        filesystem, path = fs.FileSystem.from_uri(storage_path)
        filesystem.create_dir(path)
        if isinstance(filesystem, fs.LocalFileSystem):
            TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"storage_path={storage_path!r} cannot be used: {error}. Pass a writable folder, or an address such as "
            f"'s3://bucket/folder'."
        ) from error


def repair_record(storage_path: str, name: str) -> str | None:
    """Rename Ray's record of reports if it is damaged, because Ray would not start a run with it.

    Ray writes it in place, so a killed process leaves a partial file. Heliograph does not need it to find reports.

    Returns:
        A warning; None if the record is intact or missing.
    """
    filesystem, path = _pyarrow_fs().FileSystem.from_uri(storage_path)
    record = f"{path}/{name}/{RECORD}"
    if not filesystem.get_file_info(record).is_file:
        return None
    with filesystem.open_input_file(record) as file:
        content = bytes(file.readall())
    folders = {entry.base_name for entry in list_entries(filesystem, f"{path}/{name}")}
    try:
        if all(result["checkpoint_dir_name"] in folders for result in json.loads(content)["checkpoint_results"]):
            return None
    except (ValueError, KeyError, TypeError):
        pass
    filesystem.move(record, f"{record}.damaged")
    return f"Ray's record of reports in {path}/{name} was damaged; renamed it to {RECORD}.damaged"


def list_entries(filesystem: Any, path: str) -> list[Any]:
    return list(filesystem.get_file_info(_pyarrow_fs().FileSelector(path, allow_not_found=True)))


def _pyarrow_fs() -> Any:
    return require("pyarrow.fs", "Ray's storage", extra="ray")
