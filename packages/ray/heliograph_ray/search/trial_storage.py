"""The reports in a storage from which a trial may resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from heliograph.spi import Entry, require

from ..storage.checkpoints import StoredFolder
from .location import Location

PREFIX = "checkpoint_"  # of the folders of reports, before Tune's number


def find_resumable(checkpoint: Any, location: Location) -> list[StoredFolder]:
    """Return the reports from which a trial may resume, newest first: if one is damaged, an older one is used.

    If the process of the search was killed, Tune does not know the reports of its last seconds. Reports in the trial's
    own folder that are newer than the last one that Tune knows therefore come first. Because Tune then repeats their
    numbers, they are ordered by when their checkpoints were written.

    Args:
        checkpoint: Tune's checkpoint for this trial: its own, or that of a trial which it clones; None for a new trial.
        location: of this trial.
    """
    filesystem, own = location.open_storage()
    if checkpoint is None:
        return _newest_first(_folders(filesystem, own))
    path = PurePosixPath(checkpoint.path)
    folders = dict(_folders(checkpoint.filesystem, str(path.parent)))
    known = {path.name: folders[path.name]} if path.name in folders else {}
    if str(path.parent) == own:
        known = {name: folder for name, folder in folders.items() if name >= path.name}
    older = sorted((name for name in folders if name < path.name), reverse=True)
    return [*_newest_first(known.items()), *(folders[name] for name in older)]


def _folders(filesystem: Any, path: str) -> Iterator[tuple[str, StoredFolder]]:
    selector = require("pyarrow.fs", "Ray's storage", extra="ray").FileSelector(path, allow_not_found=True)
    for each in filesystem.get_file_info(selector):
        if each.base_name.startswith(PREFIX):
            yield each.base_name, StoredFolder(filesystem, each.path, is_own=True)


def _newest_first(folders: Any) -> list[StoredFolder]:
    return [folder for _, folder in sorted(folders, key=lambda each: _order(each[1]), reverse=True)]


def _order(folder: StoredFolder) -> tuple[int, str]:
    """Return a sort key: the order of writing; a folder without an intact manifest comes first."""
    sequences = [-1, *(each.sequence for each in folder.manifests().values() if isinstance(each, Entry))]
    return max(sequences), folder.name
