"""The folders of a search and of its trials in a storage, and the file that each has beside Ray's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heliograph.spi import describe_error, require

from ..storage.checkpoints import absolute_path

if TYPE_CHECKING:
    from heliograph import RunResult

NAME = "heliograph.json"
DEFAULT = "~/ray_results"  # Ray's own default
STATE = "experiment_state"  # the start of the names of the files with Ray's state of a search


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
        """The path of the folder."""
        return f"{self.storage}/{self.name}"

    def subfolder(self, name: str) -> Location:
        """Return a folder in this one."""
        return Location(self.storage, f"{self.name}/{name}")

    def write(self, data: dict[str, Any]) -> None:
        """Write plain data as JSON, atomically."""
        filesystem, folder = self.open_storage()
        filesystem.create_dir(folder)
        with filesystem.open_output_stream(f"{folder}/{NAME}.part") as file:
            file.write(json.dumps(data).encode())
        filesystem.move(f"{folder}/{NAME}.part", f"{folder}/{NAME}")

    def read(self) -> dict[str, Any] | None:
        """Return what was written; None if nothing was."""
        filesystem, folder = self.open_storage()
        if not filesystem.get_file_info(f"{folder}/{NAME}").is_file:
            return None
        with filesystem.open_input_stream(f"{folder}/{NAME}") as file:
            data: dict[str, Any] = json.loads(file.readall())
        return data

    def has_state(self) -> bool:
        """Return whether Ray has saved the state of a search here, so that it can be read and continued."""
        filesystem, folder = self.open_storage()
        selector = require("pyarrow.fs", "Ray's storage", extra="ray").FileSelector(folder, allow_not_found=True)
        return any(each.base_name.startswith(STATE) for each in filesystem.get_file_info(selector))

    def open_storage(self) -> tuple[Any, str]:
        """Return the storage, as a file system of pyarrow, and the folder in it."""
        filesystem, folder = require("pyarrow.fs", "Ray's storage", extra="ray").FileSystem.from_uri(self.path)
        return filesystem, folder


def search_location(storage_path: str | Path | None, name: str) -> Location:
    """Return the location of a search.

    Raises:
        TypeError: the storage is not a path, or the name not a string.
        ValueError: the name cannot be that of a folder.
    """
    if not isinstance(storage_path, str | Path | None) or not isinstance(name, str):
        raise TypeError(f"storage_path is a path and name a string; got {storage_path!r} and {name!r}.")
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name= becomes a folder in the storage: it has no '/' and no leading '.'; got {name!r}.")
    return Location(absolute_path(storage_path or DEFAULT), name)


def summarize_end(result: RunResult | None, error: BaseException | None) -> dict[str, Any]:
    """Return how a trial ended, as plain data.

    Args:
        result: the result of its last training; None without any.
        error: what its function raised; None if it returned.
    """
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
