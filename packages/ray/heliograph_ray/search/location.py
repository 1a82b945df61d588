"""The folders of a search and of its trials in a storage, and their metadata files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from heliograph import RunResult
from heliograph.spi import Entry, describe_error, require

from ..storage import StoredFolder, absolute_path, list_entries

NAME = "heliograph.json"
DEFAULT = "~/ray_results"  # Ray's own default
STATE = "experiment_state"  # the start of the names of the files with Ray's state of a search

PREFIX = "checkpoint_"  # of the folders of reports, before Tune's number


@dataclass(frozen=True, slots=True)
class Location:
    """A folder in a storage.

    Attributes:
        storage: the storage: a folder, or an address such as `s3://...`.
        name: the folder in it, with slashes for nested ones.
    """

    storage: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.storage}/{self.name}"

    def subfolder(self, name: str) -> Location:
        return Location(self.storage, f"{self.name}/{name}")

    def write(self, data: dict[str, Any]) -> None:
        filesystem, folder = self.open_storage()
        filesystem.create_dir(folder)
        with filesystem.open_output_stream(f"{folder}/{NAME}.part") as file:
            file.write(json.dumps(data).encode())
        filesystem.move(f"{folder}/{NAME}.part", f"{folder}/{NAME}")

    def read(self) -> dict[str, Any] | None:
        filesystem, folder = self.open_storage()
        if not filesystem.get_file_info(f"{folder}/{NAME}").is_file:
            return None
        with filesystem.open_input_stream(f"{folder}/{NAME}") as file:
            data: dict[str, Any] = json.loads(file.readall())
        return data

    def has_state(self) -> bool:
        return any(file.base_name.startswith(STATE) for file in list_entries(*self.open_storage()))

    def open_storage(self) -> tuple[Any, str]:
        filesystem, folder = require("pyarrow.fs", "Ray's storage", extra="ray").FileSystem.from_uri(self.path)
        return filesystem, folder


def search_location(storage_path: str | Path | None, name: str) -> Location:
    if not isinstance(storage_path, str | Path | None) or not isinstance(name, str):
        raise TypeError(f"storage_path is a path and name a string; got {storage_path!r} and {name!r}.")
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name= becomes a folder in the storage: it has no '/' and no leading '.'; got {name!r}.")
    return Location(absolute_path(storage_path or DEFAULT), name)


def summarize_end(result: RunResult | None, error: BaseException | None) -> dict[str, Any]:
    if error is not None:
        return {"status": "failed", "reason": describe_error(error)}
    if result is None:
        return {"status": "completed", "reason": "the function returned"}
    return {
        "status": result.status,
        "reason": result.reason,
        "stopped_by": result.stopped_by,
        "notes": list(result.notes),
        "warnings": list(result.warnings),
    }


def find_resumable(checkpoint: Any, location: Location) -> list[StoredFolder]:
    """Return the reports that a trial may resume, newest first, so that an older one replaces a damaged one.

    If the search was killed, Tune does not list the reports of its last seconds, and repeats their numbers. Newer
    reports in the trial's own folder therefore come first, in reverse order of writing.

    Args:
        checkpoint: Tune's checkpoint for this trial, which may be a clone; None for a new trial.
        location: the folder of this trial.
    """
    filesystem, folder = location.open_storage()
    if checkpoint is None:
        return _newest_first(_folders(filesystem, folder))
    path = PurePosixPath(checkpoint.path)
    folders = dict(_folders(checkpoint.filesystem, str(path.parent)))
    newer = {path.name: folders[path.name]} if path.name in folders else {}
    if str(path.parent) == folder:
        newer = {name: stored for name, stored in folders.items() if name >= path.name}
    older = sorted((name for name in folders if name < path.name), reverse=True)
    return [*_newest_first(newer.items()), *(folders[name] for name in older)]


def _folders(filesystem: Any, path: str) -> Iterator[tuple[str, StoredFolder]]:
    for info in list_entries(filesystem, path):
        if info.base_name.startswith(PREFIX):
            yield info.base_name, StoredFolder(filesystem, info.path, is_own=True)


def _newest_first(folders: Any) -> list[StoredFolder]:
    return [folder for _, folder in sorted(folders, key=lambda pair: _order(pair[1]), reverse=True)]


def _order(folder: StoredFolder) -> tuple[int, str]:
    sequences = [-1, *(entry.sequence for entry in folder.manifests().values() if isinstance(entry, Entry))]
    return max(sequences), folder.name
