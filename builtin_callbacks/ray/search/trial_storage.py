"""What a trial goes on from, as the storage has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ....core.checkpoint.storage.manifest import decode
from ....core.system.extras import require
from ..storage.checkpoints import StoredFolder
from .places import Place

PREFIX = "checkpoint_"  # of the folders of reports, which Tune counts


def begun_from(checkpoint: Any, place: Place) -> list[StoredFolder]:
    """Return what a trial goes on from, the newest first: older ones stand in for one that is damaged.

    Where the process that searched was killed, Tune has forgotten the reports of its last seconds. So what lies in the
    trial's own folder and is newer than what Tune knows is taken first; after such a loss Tune counts on from what it
    knows, and so the number of a folder is no measure, but the order in which checkpoints were written is.

    Args:
        checkpoint: what Tune says, one of its own: this trial's, or that of a trial which is cloned. None for nothing.
        place: of this trial.
    """
    filesystem, own = place.opened()
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
    """Return the place of a folder in the order of writing; one without a whole manifest comes behind all others."""
    sequences = [-1]
    for name, content in folder.manifests().items():
        try:
            sequences.append(decode(content, Path(name)).sequence)
        except ValueError:
            continue
    return max(sequences), folder.name
