"""What an interrupted save or removal left behind: finished where it can be, else undone."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from .files import Files, digest_of
from .manifest import Entry, decode, manifest_path, shards_path
from .names import MANIFEST, Hidden


def sweep(files: Files, folder: Path, run_name: str) -> list[str]:
    """Bring the files of a run in order; return a sentence for each thing that was done.

    Raises:
        OSError: something could not be renamed or removed.
    """
    hidden = Hidden.of(folder, run_name)
    notes = _settle(files, hidden, folder)
    if hidden.doomed.exists():
        notes.append(finish_removal(files, hidden))
    return notes


def finish_removal(files: Files, hidden: Hidden) -> str:
    """Remove the data that a tombstone names, then the tombstone."""
    try:
        doomed = decode(hidden.doomed.read_bytes(), hidden.doomed)
    except ValueError as error:
        files.unlink(hidden.doomed)
        return f"A removal was interrupted, and what it was to remove is not known: {error}"
    if not manifest_path(doomed.path).exists():  # else the name has been given to a newer one
        files.unlink(doomed.path)
        files.remove_folder(shards_path(doomed.path))
    files.unlink(hidden.doomed)
    return f"The removal of {doomed.path}, which was interrupted, is finished."


def _settle(files: Files, hidden: Hidden, folder: Path) -> list[str]:
    """Finish a save whose data and manifest were complete; undo any other."""
    temporary = (hidden.data, hidden.manifest, hidden.former_data, hidden.former_manifest, hidden.pointer)
    folders = (hidden.shards, hidden.former_shards)
    left = [path for path in (*temporary, *folders) if path.exists()]
    if not left:
        return []
    begun = _read(hidden.manifest) or _in_place(hidden, folder)
    finished = begun is not None and _finish(files, hidden, begun)
    former = _read(hidden.former_manifest) or begun
    if former is not None and not _is_whole(former.path):
        _bring_back(files, hidden, former.path)
    files.sync_folder(folder)
    for path in left:
        files.remove_folder(path) if path in folders else files.unlink(path)
    if finished and begun is not None:
        return [f"The save of {begun.path}, which was interrupted, is finished."]
    return [f"An interrupted save left {', '.join(path.name for path in left)}: removed."]


def _in_place(hidden: Hidden, folder: Path) -> Entry | None:
    """Return the entry of a save whose manifest has its final name, while its data or its shards do not."""
    digest = _digest(hidden.data)
    manifests = [each for each in map(_read, sorted(folder.glob(f"*{MANIFEST}"))) if each is not None]
    of_data = (each for each in manifests if each.sha256 == digest)
    of_shards = (each for each in manifests if each.shards and _holds(hidden.shards, each))
    return next(chain(of_data, of_shards), None)


def _finish(files: Files, hidden: Hidden, begun: Entry) -> bool:
    """Put a complete save in place; return whether it was complete."""
    shards = shards_path(begun.path)
    if not (_holds(hidden.shards, begun) or _holds(shards, begun)):
        return False
    if _digest(hidden.data) == begun.sha256:
        files.rename(hidden.data, begun.path)
    elif _digest(begun.path) != begun.sha256:
        return False
    if not (begun.shards and _holds(shards, begun)):
        files.remove_folder(shards)  # of what is being replaced
        if begun.shards:
            files.rename(hidden.shards, shards)
    if _read(hidden.manifest) is not None:
        files.rename(hidden.manifest, manifest_path(begun.path))
    return True


def _is_whole(path: Path) -> bool:
    entry = _read(manifest_path(path))
    return entry is not None and _digest(path) == entry.sha256 and _holds(shards_path(path), entry)


def _holds(folder: Path, entry: Entry) -> bool:
    """Return whether a folder holds all shards of a checkpoint."""
    return all(_digest(folder / name) == sha256 for name, (_, sha256) in entry.shards.items())


def _bring_back(files: Files, hidden: Hidden, path: Path) -> None:
    """Give what was about to be replaced its names back."""
    if hidden.former_shards.exists():
        files.remove_folder(shards_path(path))
        files.rename(hidden.former_shards, shards_path(path))
    for former, name in ((hidden.former_data, path), (hidden.former_manifest, manifest_path(path))):
        if former.exists():
            files.rename(former, name)


def _digest(path: Path) -> str | None:
    try:
        return digest_of(path)[1]
    except FileNotFoundError:
        return None


def _read(place: Path) -> Entry | None:
    """Return the entry in a manifest that may be missing or cut short."""
    try:
        return decode(place.read_bytes(), place)
    except (FileNotFoundError, IsADirectoryError, ValueError):
        return None
