"""Checkpoints in Ray's storage: what a report's folder holds, and how it comes back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any

from ....core.system.extras import require

MANIFEST = ".json"
RECORD = "checkpoint_manager_snapshot.json"  # as Ray calls it
NAME = re.compile(r"checkpoint_(\d{6,})_(\w+)")


class StoredFolder:
    """A folder in a storage.

    Args:
        filesystem: the storage, one of pyarrow's.
        path: the folder in it.
        is_own: whether an earlier process of the same call has reported it.
    """

    def __init__(self, filesystem: Any, path: str, *, is_own: bool) -> None:
        self.name, self.is_own = PurePosixPath(path).name, is_own
        self._filesystem, self._path = filesystem, path

    def manifests(self) -> dict[str, bytes]:
        """Return the small files that end in `.json`, by name."""
        found = {}
        for each in _entries(self._filesystem, self._path):
            if each.base_name.endswith(MANIFEST):
                with self._filesystem.open_input_file(each.path) as file:
                    found[each.base_name] = bytes(file.readall())
        return found

    def fetch(self, folder: Path) -> None:
        """Copy everything in it into a folder.

        Raises:
            OSError: the storage or the disk did not do it.
        """
        fs = _pyarrow_fs()
        place, local = str(folder.absolute()), fs.LocalFileSystem()
        fs.copy_files(self._path, place, source_filesystem=self._filesystem, destination_filesystem=local)


@dataclass(frozen=True, slots=True)
class Listed:
    """A report's folder in a storage.

    Attributes:
        filesystem: the storage.
        path: the folder.
        number: its place in the order of reporting.
        call: which call of the launcher reported it.
    """

    filesystem: Any
    path: str
    number: int
    call: str


def name_of(number: int, call: str) -> str:
    """Return what the folder of a report is called."""
    return f"checkpoint_{number:06d}_{call}"


def listed(filesystem: Any, path: str) -> list[Listed]:
    """Return the folders of reports of a run in a storage, newest first; clocks have no part in it."""
    matches = [(each.path, NAME.fullmatch(each.base_name)) for each in _entries(filesystem, path)]
    found = [Listed(filesystem, place, int(match[1]), match[2]) for place, match in matches if match is not None]
    return sorted(found, key=lambda each: each.number, reverse=True)


def whole_path(storage_path: str | Path) -> str:
    """Return where a storage is for all processes: a relative folder is one beneath the folder of this process."""
    path = str(storage_path)
    return path.rstrip("/") if "://" in path else str(Path(path).expanduser().absolute())


def check_usable(storage_path: str) -> None:
    """Raise where nothing can be stored, before anything starts; create the folder where there is none.

    Args:
        storage_path: a folder or an address such as `s3://bucket`.

    Raises:
        OSError: it cannot be reached, created or written to.
        ValueError: there is no such kind of storage.
    """
    fs = _pyarrow_fs()
    try:
        filesystem, path = fs.FileSystem.from_uri(storage_path)
        filesystem.create_dir(path)
        if isinstance(filesystem, fs.LocalFileSystem):
            TemporaryFile(dir=path).close()
    except ValueError as error:
        raise ValueError(f"storage_path={storage_path!r} leads to no storage: {error}") from error
    except OSError as error:
        raise OSError(
            f"storage_path={storage_path!r} cannot be used: {error}. Give a folder that this process may write to, or "
            f"an address such as 's3://bucket/folder'."
        ) from error


def mend_record(storage_path: str, name: str) -> str | None:
    """Put Ray's record of what was reported aside where it cannot be used: Ray would begin no run beside it.

    Ray writes it in place, so who dies meanwhile leaves half of it. What was reported is found without it.

    Args:
        storage_path: a folder or an address such as `s3://bucket`.
        name: of the run in the storage.

    Returns:
        What was done, None where it is as it should be.
    """
    filesystem, path = _pyarrow_fs().FileSystem.from_uri(storage_path)
    place = f"{path}/{name}/{RECORD}"
    if not filesystem.get_file_info(place).is_file:
        return None
    with filesystem.open_input_file(place) as file:
        content = bytes(file.readall())
    there = {each.base_name for each in _entries(filesystem, f"{path}/{name}")}
    try:
        if all(each["checkpoint_dir_name"] in there for each in json.loads(content)["checkpoint_results"]):
            return None
    except (ValueError, KeyError, TypeError):  # half of it
        pass
    filesystem.move(place, f"{place}.damaged")
    return f"Ray's record of reports in {path}/{name} was damaged, and is put aside: {RECORD}.damaged"


def _entries(filesystem: Any, path: str) -> list[Any]:
    """Return what lies in a folder; nothing where there is none."""
    return list(filesystem.get_file_info(_pyarrow_fs().FileSelector(path, allow_not_found=True)))


def _pyarrow_fs() -> Any:
    return require("pyarrow.fs", "Ray's storage", extra="ray")
