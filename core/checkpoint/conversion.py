"""Conversion of checkpoints on disk: those of Helios, and shards become one file of ours."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import foreign_files, helios
from .state.ranks import join_shards
from .state.schema import SCHEMA
from .storage import reader
from .storage.manifest import SUFFIX, Entry, MissingManifestError
from .storage.reader import State
from .storage.store import Store
from .storage.untrusted_files import check_content

BACKUP = ".backup"


@dataclass(frozen=True, slots=True)
class Upgraded:
    """A checkpoint of Helios, converted to the present schema.

    Attributes:
        origin: its version of Helios.
        state: its state.
        changes: what was changed, in sentences.
        sequence: its number in the order of writing.
    """

    origin: str
    state: State
    changes: list[str]
    sequence: int


def files_in(path: Path) -> list[Path]:
    """Return a file, or the files in a folder that are named like checkpoints."""
    return sorted(each for each in path.glob(f"*{SUFFIX}") if not each.is_dir()) if path.is_dir() else [path]


def migrate_file(
    path: Path, *, keep_backup: bool = True, dry_run: bool = False, as_data: Collection[str] = ()
) -> list[str]:
    """Convert a checkpoint of Helios to the present schema, and write its manifest.

    The former file is kept as `<name>.pth.backup`. The new one replaces it in one step, as every save does, so nothing
    is lost if the process is killed: run it again. A checkpoint that is up to date is not changed.

    Args:
        path: a data file.
        keep_backup: keep the former file.
        dry_run: change nothing, only return what would be done.
        as_data: full names of classes whose objects are read as their attributes, if the file is refused because of
            them.

    Returns:
        What was done, line by line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or no checkpoint, or another process writes this run's checkpoints.
        OSError: the new file could not be written; the former is as it was.
    """
    if is_current(path):
        return [f"{path}: up to date (schema {SCHEMA})"]
    found = read_any(path, as_data)
    if dry_run:
        return [f"{path}: would be migrated to schema {SCHEMA}", *_indent(found.changes)]
    store = Store(path.parent, found.state["run_name"], found.state["training_id"])
    notes = store.open()
    try:
        if store.is_pinned(path):
            raise ValueError(f"{path} is pinned, and so is not replaced: remove the pin, migrate, and pin it again.")
        backup = back_up(path)
        store.save(path.name, found.state, sequence=found.sequence, replace_unknown=True)
    finally:
        store.close()
    if not keep_backup:
        backup.unlink()
    kept = f", the former file is {backup.name}" if keep_backup else ""
    return [f"{path}: migrated to schema {SCHEMA}{kept}", *_indent([*notes, *found.changes])]


def is_current(path: Path) -> bool:
    """Return whether a checkpoint has the present schema, and a manifest that matches.

    Raises:
        ValueError: it is damaged, or has another schema.
    """
    try:
        reader.check(path)
    except MissingManifestError:
        return False
    return True


def read_any(path: Path, as_data: Collection[str] = ()) -> Upgraded:
    """Return a checkpoint of Helios in the present schema.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, no checkpoint, or holds objects that are not safe to create.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {path}.")
    saved = foreign_files.read_with_stand_ins(path, [*helios.RECORDS, *map(re.escape, as_data)], helios.TEXTS)
    try:
        saved = foreign_files.as_plain(saved)
        check_content(saved, path)
        return _upgrade(saved, path)
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
    ) as error:  # parts are missing, or not ours
        raise ValueError(f"{path} is not a checkpoint that can be migrated: {error}") from error


def _upgrade(saved: Any, path: Path) -> Upgraded:
    if not helios.is_ancestor(saved):
        raise ValueError("it has no manifest, and was not written by Helios.")
    state, notes = helios.convert(saved, path)
    return Upgraded(f"Helios {state['versions']['helios']}", state, notes, helios.sequence_of(state))


def backup_of(path: Path) -> Path:
    """Return the path of the backup."""
    return path.with_name(path.name + BACKUP)


def back_up(path: Path) -> Path:
    """Back up a file, completely or not at all; return the path of the backup.

    Raises:
        ValueError: another file has that path.
    """
    backup = backup_of(path)
    if backup.exists():
        if not filecmp.cmp(path, backup, shallow=False):
            raise ValueError(f"{backup} is there already, with other content: move it away first.")
        return backup
    try:
        os.link(path, backup)  # needs no copy, as a save never writes into an existing file
    except OSError:  # a file system without links
        aside = backup.with_name(f".{backup.name}.tmp")
        shutil.copy2(path, aside)
        with aside.open("r+b") as file:  # Windows syncs only a file that may be written
            os.fsync(file.fileno())
        aside.replace(backup)
    return backup


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def consolidate(path: Path | str, out: Path | str | None = None) -> Entry:
    """Convert a checkpoint with shards to one file, as other engines write it.

    Args:
        path: the data file of a checkpoint with shards.
        out: where to write; by default the former checkpoint and its shards are replaced.

    Returns:
        The entry of what was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has no shards or is pinned; or another process writes this run's checkpoints there.
        OSError: it could not be written; the former is as it was.
    """
    path = Path(path)
    out = path if out is None else Path(out)
    state, former = reader.load(path), reader.read_manifest(path)
    if "shards" not in state:
        raise ValueError(f"{path} has no shards: it is an ordinary checkpoint already.")
    with closing(Store(out.parent, former.family)) as store:
        store.open()
        store.write_as(former.training, former.run_name)
        if store.is_pinned(out):
            raise ValueError(
                f"{out} is pinned, and so is not replaced: remove the pin, or write elsewhere, --out FILE."
            )
        judged, sequence = former.judged_by, former.sequence
        return store.save(
            out.name, join_shards(state, path), judged_by=judged, sequence=sequence, replace_unknown=out == path
        )
