"""Saves and removals that a kill interrupted: finished at the next start if possible, else undone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from .files import Files
from .folder import Manifests
from .manifest import MOST, SUFFIX, Entry, Hidden, SchemaError, decode, manifest_path, shards_path


def sweep(files: Files, folder: Path, run_name: str) -> list[str]:
    """Finish or undo what was interrupted in a run's files; return a sentence for each thing that was done.

    The caller holds the lock of the run, and those of the names that `interrupted_names` returns.

    Raises:
        SchemaError: a version with another schema was interrupted, and only that version can finish its save.
        OSError: a file could not be renamed or removed.
    """
    hidden = Hidden.of(folder, run_name)
    notes = _finish_or_undo(files, hidden, folder)
    if files.exists(hidden.doomed):
        notes.append(finish_removal(files, hidden))
    return notes


def interrupted_names(files: Files, folder: Path, run_name: str) -> set[str]:
    """Return the names under which a killed process of the run was saving or removing checkpoints.

    Raises:
        SchemaError: a version with another schema was interrupted.
        OSError: a file cannot be read.
    """
    hidden = Hidden.of(folder, run_name)
    begun, former = _interrupted_entries(files, hidden, folder) if _left(files, hidden) else (None, None)
    entries = (begun, former, _there(files, hidden.doomed))
    return {each.run_name for each in entries if each is not None}


def finish_removal(files: Files, hidden: Hidden) -> str:
    """Remove the checkpoint that a manifest marked as doomed names, then that manifest."""
    try:
        doomed = decode(files.read(hidden.doomed, MOST), hidden.doomed)
    except ValueError as error:
        files.unlink(hidden.doomed)
        return f"A removal was interrupted, and what it was to remove is not known: {error}"
    note, shards = f"The removal of {doomed.path}, which was interrupted, is finished.", shards_path(doomed.path)
    if files.exists(manifest_path(doomed.path)):  # a newer checkpoint has the name now
        pass
    elif not files.exists(doomed.path) or _digest(files, doomed.path) == doomed.sha256:
        files.unlink(doomed.path)
        if files.exists(shards) and _is_rest(files, shards, doomed):
            files.remove_folder(shards)
    else:
        note = f"A removal of {doomed.path} was interrupted; what has that name now is another file, and stays."
    files.unlink(hidden.doomed)
    return note


def _finish_or_undo(files: Files, hidden: Hidden, folder: Path) -> list[str]:
    """Finish an interrupted save whose data and manifest are complete; undo any other."""
    if not _left(files, hidden):
        return []
    begun, former = _interrupted_entries(files, hidden, folder)
    ours = [each for each in (begun, former) if each is not None]
    finished = None if begun is None else _finish(files, hidden, begun, ours)
    restored = None
    if finished is None and ours and not _is_whole(files, ours[-1]):
        restored = _bring_back(files, hidden, ours[-1], ours)
    files.sync_folder(folder)
    left = _left(files, hidden)
    for path in left:
        files.remove_folder(path) if path in (hidden.shards, hidden.former_shards) else files.unlink(path)
    if finished is not None:
        return [f"The save of {finished}, which was interrupted, is finished."]
    undone = [f"An interrupted save left {', '.join(path.name for path in left)}: removed."] if left else []
    return undone + ([f"An interrupted save had begun to replace {restored}, which is as it was."] if restored else [])


def _left(files: Files, hidden: Hidden) -> list[Path]:
    """Return the hidden files and folders of a save that exist; manifests, which describe the others, come first."""
    manifests, data = (hidden.manifest, hidden.former_manifest), (hidden.data, hidden.former_data, hidden.pointer)
    return [path for path in (*manifests, *data, hidden.shards, hidden.former_shards) if files.exists(path)]


def _interrupted_entries(files: Files, hidden: Hidden, folder: Path) -> tuple[Entry | None, Entry | None]:
    """Return the checkpoint that was being saved, and the one of the same training that it was to replace."""
    begun = _read(files, hidden.manifest) or _entry_in_place(files, hidden, folder)
    former = _read(files, hidden.former_manifest)
    if former is None and begun is not None:
        there = _there(files, manifest_path(begun.path))
        former = there if there is not None and there.training == begun.training else None
    return begun, former


def _entry_in_place(files: Files, hidden: Hidden, folder: Path) -> Entry | None:
    """Return the entry of a save whose manifest has its final name already, but not its data or shards."""
    digest = _digest(files, hidden.data)
    manifests = []
    for found in Manifests(folder, files).look():
        if isinstance(found.problem, OSError | SchemaError) and found.path.name.startswith(hidden.prefix):
            raise found.problem  # it may be the one
        manifests += [] if found.entry is None else [found.entry]
    of_data = (each for each in manifests if each.sha256 == digest)
    of_shards = (each for each in manifests if each.shards and _holds(files, hidden.shards, each))
    return next(chain(of_data, of_shards), None)


def _finish(files: Files, hidden: Hidden, begun: Entry, ours: Sequence[Entry]) -> Path | None:
    """Give the files of a complete save their final names; return the path, or None if it is not complete."""
    data = _find_data(files, hidden.data, begun)
    if data is None:
        return None
    path = _own_path(files, hidden, begun, data, ours)
    places = (hidden.shards, shards_path(path), shards_path(begun.path))
    shards = next((each for each in places if _holds(files, each, begun)), None)
    if shards is None:
        return None
    if data != path:
        files.rename(data, path)
    _put_shards(files, begun, shards, path, hidden.former_shards)
    if _read(files, hidden.manifest) is not None:
        files.rename(hidden.manifest, manifest_path(path))
    return path


def _bring_back(files: Files, hidden: Hidden, former: Entry, ours: Sequence[Entry]) -> Path | None:
    """Give the files that were being replaced their names back; return the path, or None if they still had them."""
    aside = (hidden.former_data, hidden.former_shards, hidden.former_manifest)
    if not any(files.exists(each) for each in aside):
        return None
    is_aside = files.exists(hidden.former_data)
    data = hidden.former_data if is_aside else _find_data(files, hidden.former_data, former)
    path = _own_path(files, hidden, former, data, ours)
    if data is not None and data != path:
        files.rename(data, path)
    if files.exists(hidden.former_shards):
        _put_shards(files, former, hidden.former_shards, path, hidden.shards)
    elif path != former.path and former.shards and _holds(files, own := shards_path(former.path), former):
        _put_shards(files, former, own, path, hidden.shards)  # not put aside yet, and its name is another's by now
    if files.exists(hidden.former_manifest):
        files.rename(hidden.former_manifest, manifest_path(path))
    return path


def _find_data(files: Files, aside: Path, entry: Entry) -> Path | None:
    """Return the data file of a checkpoint: the hidden one, or the one that a killed process renamed; else None."""
    if _digest(files, aside) == entry.sha256:
        return aside
    name = re.compile(rf"{re.escape(entry.path.stem)}(-\d+)?{re.escape(SUFFIX)}")
    paths = (entry.path.with_name(each.name) for each in files.names(aside.parent) if name.fullmatch(each.name))
    return next((path for path in sorted(paths) if _digest(files, path) == entry.sha256), None)


def _own_path(files: Files, hidden: Hidden, entry: Entry, data: Path | None, ours: Sequence[Entry]) -> Path:
    """Return the free path of a checkpoint: that of its data, else its own, else its own with a number."""
    numbered = (entry.path.with_name(f"{entry.path.stem}-{number}{SUFFIX}") for number in count(2))
    paths = chain([] if data in (None, hidden.data, hidden.former_data) else [data], [entry.path], numbered)
    return next(path for path in paths if _is_own(files, path, ours))


def _is_own(files: Files, path: Path, ours: Sequence[Entry]) -> bool:
    """Return whether a name is free, or used only by the interrupted save or by what that replaces."""
    manifest, shards, replaced = manifest_path(path), shards_path(path), {each.replaces for each in ours} - {""}
    digests = {each.sha256 for each in ours}
    if (there := _there(files, manifest)) is not None:
        return there.sha256 in digests
    digest = _digest(files, path)
    if files.exists(manifest) and digest not in replaced:
        return False
    if files.exists(path) and digest not in digests | replaced:
        return False
    return not files.exists(shards) or any(each.shards and _holds(files, shards, each) for each in ours)


def _put_shards(files: Files, entry: Entry, shards: Path, path: Path, aside: Path) -> None:
    """Rename the shards of a checkpoint to their final name; others with it, of the same save, go aside."""
    place = shards_path(path)
    if shards != place or not entry.shards:
        if files.exists(place):
            files.rename(place, aside)
        if entry.shards:
            files.rename(shards, place)


def _is_whole(files: Files, entry: Entry) -> bool:
    """Return whether the checkpoint with this path is intact and of the same training."""
    there = _there(files, manifest_path(entry.path))
    if there is None or there.training != entry.training or _digest(files, entry.path) != there.sha256:
        return False
    return _holds(files, shards_path(entry.path), there)


def _holds(files: Files, folder: Path, entry: Entry) -> bool:
    """Return whether a folder holds all shards of a checkpoint."""
    return all(_digest(files, folder / name) == sha256 for name, (_, sha256) in entry.shards.items())


def _is_rest(files: Files, folder: Path, entry: Entry) -> bool:
    """Return whether a folder holds nothing but shards of a checkpoint, all or some of them."""
    names = {each.name for each in files.names(folder)}
    return names <= entry.shards.keys() and all(
        _digest(files, folder / name) == entry.shards[name][1] for name in names
    )


def _digest(files: Files, path: Path) -> str | None:
    try:
        return files.digest(path)[1]
    except (FileNotFoundError, ValueError):
        return None


def _read(files: Files, place: Path) -> Entry | None:
    """Return the entry in a manifest; None if it is missing or truncated.

    Raises:
        SchemaError: it has another schema.
    """
    try:
        return decode(files.read(place, MOST), place)
    except SchemaError:
        raise
    except (FileNotFoundError, ValueError):
        return None


def _there(files: Files, place: Path) -> Entry | None:
    """Return the entry in a manifest of any run; None if it cannot be used."""
    try:
        return _read(files, place)
    except SchemaError:
        return None
