"""Where a search and its trials lie in a storage, and what is written there beside what Ray writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.system.extras import require
from ....events.errors import describe_error
from ..storage.checkpoints import whole_path

if TYPE_CHECKING:
    from ....core.result import RunResult

NAME = "heliograph.json"
DEFAULT = "~/ray_results"  # Ray's own
STATE = "experiment_state"  # begins the names of the files in which Ray keeps a search


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in a storage.

    Attributes:
        storage: the storage: a folder, or `s3://...` and the like.
        name: the folder in it; with slashes, one within another.
    """

    storage: str
    name: str

    @property
    def path(self) -> str:
        """The whole of it."""
        return f"{self.storage}/{self.name}"

    def within(self, name: str) -> Place:
        """Return a folder in this one."""
        return Place(self.storage, f"{self.name}/{name}")

    def write(self, data: dict[str, Any]) -> None:
        """Write plain data, which a reader finds whole or not at all."""
        filesystem, folder = self.opened()
        filesystem.create_dir(folder)
        with filesystem.open_output_stream(f"{folder}/{NAME}.part") as file:
            file.write(json.dumps(data).encode())
        filesystem.move(f"{folder}/{NAME}.part", f"{folder}/{NAME}")

    def read(self) -> dict[str, Any] | None:
        """Return what was written; None where nothing was."""
        filesystem, folder = self.opened()
        if not filesystem.get_file_info(f"{folder}/{NAME}").is_file:
            return None
        with filesystem.open_input_stream(f"{folder}/{NAME}") as file:
            data: dict[str, Any] = json.loads(file.readall())
        return data

    def has_begun(self) -> bool:
        """Return whether Ray has written down a search here, which can be read, and gone on with."""
        filesystem, folder = self.opened()
        selector = require("pyarrow.fs", "Ray's storage", extra="ray").FileSelector(folder, allow_not_found=True)
        return any(each.base_name.startswith(STATE) for each in filesystem.get_file_info(selector))

    def opened(self) -> tuple[Any, str]:
        """Return the storage, one of pyarrow's file systems, and the folder in it."""
        filesystem, folder = require("pyarrow.fs", "Ray's storage", extra="ray").FileSystem.from_uri(self.path)
        return filesystem, folder


def place_of(storage_path: str | Path | None, name: str) -> Place:
    """Return the place of a search.

    Raises:
        TypeError: the storage is no path, or the name no string.
        ValueError: the name is none for a folder.
    """
    if not isinstance(storage_path, str | Path | None) or not isinstance(name, str):
        raise TypeError(f"storage_path is a path and name a string; got {storage_path!r} and {name!r}.")
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"name= becomes a folder in the storage, so it has no '/' and no '.' in front; got {name!r}.")
    return Place(whole_path(storage_path or DEFAULT), name)


def ending(result: RunResult | None, error: BaseException | None) -> dict[str, Any]:
    """Return how a trial ended, as plain data.

    Args:
        result: how its last training ended.
        error: what its function raised.
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
    }
