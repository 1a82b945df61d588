"""What an interrupted save or removal left behind: finished where it can be, else undone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from .files import Files
from .listing import Manifests
from .manifest import MOST, Entry, decode, manifest_path, shards_path
from .names import SUFFIX, Hidden


def sweep(files: Files, folder: Path, run_name: str) -> list[str]:
    """Bring the files of a run in order; return a sentence for each thing that was done.

    Raises:
        OSError: something could not be renamed or removed.
    """
    hidden = Hidden.of(folder, run_name)
    notes = _settle(files, hidden, folder)
    if files.exists(hidden.doomed):
        notes.append(finish_removal(files, hidden))
    return notes


def finish_removal(files: Files, hidden: Hidden) -> str:
    """Remove the data that a tombstone names, then the tombstone."""
    try:
        doomed = decode(files.read(hidden.doomed, MOST), hidden.doomed)
    except ValueError as error:
        files.unlink(hidden.doomed)
        return f"A removal was interrupted, and what it was to remove is not known: {error}"
    note = f"The removal of {doomed.path}, which was interrupted, is finished."
    if files.exists(manifest_path(doomed.path)):  # the name has been given to a newer one
        pass
    elif _digest(files, doomed.path) in (None, doomed.sha256):
        files.unlink(doomed.path)
        if doomed.shards:
            files.remove_folder(shards_path(doomed.path))
    else:
        note = f"A removal of {doomed.path} was interrupted; what has that name now is another file, and stays."
    files.unlink(hidden.doomed)
    return note


def _settle(files: Files, hidden: Hidden, folder: Path) -> list[str]:
    """Finish a save whose data and manifest were complete; undo any other."""
    temporary = (hidden.data, hidden.manifest, hidden.former_data, hidden.former_manifest, hidden.pointer)
    folders = (hidden.shards, hidden.former_shards)
    left = [path for path in (*temporary, *folders) if files.exists(path)]
    if not left:
        return []
    begun = _read(files, hidden.manifest) or _in_place(files, hidden, folder)
    former = _read(files, hidden.former_manifest) or begun
    ours = [each for each in (begun, former) if each is not None]
    finished = None if begun is None else _finish(files, hidden, begun, ours)
    if finished is None and former is not None and not _is_whole(files, former):
        _bring_back(files, hidden, _own_path(files, former, ours))
    files.sync_folder(folder)
    for path in left:
        files.remove_folder(path) if path in folders else files.unlink(path)
    if finished is not None:
        return [f"The save of {finished}, which was interrupted, is finished."]
    return [f"An interrupted save left {', '.join(path.name for path in left)}: removed."]


def _in_place(files: Files, hidden: Hidden, folder: Path) -> Entry | None:
    """Return the entry of a save whose manifest has its final name, while its data or its shards do not."""
    digest = _digest(files, hidden.data)
    manifests = []
    for found in Manifests(folder, files).look():
        if isinstance(found.problem, OSError) and found.path.name.startswith(hidden.prefix):
            raise found.problem  # it may be the one
        manifests += [] if found.entry is None else [found.entry]
    of_data = (each for each in manifests if each.sha256 == digest)
    of_shards = (each for each in manifests if each.shards and _holds(files, hidden.shards, each))
    return next(chain(of_data, of_shards), None)


def _finish(files: Files, hidden: Hidden, begun: Entry, ours: Sequence[Entry]) -> Path | None:
    """Put a complete save in place; return where, None where it was not complete."""
    path = _own_path(files, begun, ours)
    shards = shards_path(path)
    if not (_holds(files, hidden.shards, begun) or _holds(files, shards, begun)):
        return None
    if _digest(files, hidden.data) == begun.sha256:
        files.rename(hidden.data, path)
    elif _digest(files, path) != begun.sha256:
        return None
    if not (begun.shards and _holds(files, shards, begun)):
        files.remove_folder(shards)  # of what is being replaced
        if begun.shards:
            files.rename(hidden.shards, shards)
    if _read(files, hidden.manifest) is not None:
        files.rename(hidden.manifest, manifest_path(path))
    return path


def _own_path(files: Files, entry: Entry, ours: Sequence[Entry]) -> Path:
    """Return where a checkpoint belongs; with a number, where another training has taken its name meanwhile."""
    path, number = entry.path, 1
    there = _read(files, manifest_path(path))
    if there is None or there.training == entry.training:
        return path
    while not _is_own(files, path, ours):
        number += 1
        path = entry.path.with_name(f"{entry.path.stem}-{number}{SUFFIX}")
    return path


def _is_own(files: Files, path: Path, ours: Sequence[Entry]) -> bool:
    """Return whether a name is free, or what has it is of the interrupted save itself."""
    there, shards, digests = _read(files, manifest_path(path)), shards_path(path), {each.sha256 for each in ours}
    if there is not None:
        return there.sha256 in digests
    if files.exists(path) and _digest(files, path) not in digests:
        return False
    return not files.exists(shards) or any(each.shards and _holds(files, shards, each) for each in ours)


def _is_whole(files: Files, entry: Entry) -> bool:
    """Return whether a checkpoint of the same training has its place, whole."""
    there = _read(files, manifest_path(entry.path))
    if there is None or there.training != entry.training or _digest(files, entry.path) != there.sha256:
        return False
    return _holds(files, shards_path(entry.path), there)


def _holds(files: Files, folder: Path, entry: Entry) -> bool:
    """Return whether a folder holds all shards of a checkpoint."""
    return all(_digest(files, folder / name) == sha256 for name, (_, sha256) in entry.shards.items())


def _bring_back(files: Files, hidden: Hidden, path: Path) -> None:
    """Give what was about to be replaced its names back."""
    if files.exists(hidden.former_shards):
        files.remove_folder(shards_path(path))
        files.rename(hidden.former_shards, shards_path(path))
    for former, name in ((hidden.former_data, path), (hidden.former_manifest, manifest_path(path))):
        if files.exists(former):
            files.rename(former, name)


def _digest(files: Files, path: Path) -> str | None:
    try:
        return files.digest(path)[1]
    except (FileNotFoundError, ValueError):
        return None


def _read(files: Files, place: Path) -> Entry | None:
    """Return the entry in a manifest that may be missing or cut short."""
    try:
        return decode(files.read(place, MOST), place)
    except (FileNotFoundError, ValueError):
        return None
