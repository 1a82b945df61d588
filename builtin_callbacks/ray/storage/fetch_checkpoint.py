"""How a run that is begun anew finds what Ray has stored of it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....core.checkpoint import storage
from ....core.checkpoint.storage import Entry, Store
from ....core.checkpoint.storage.manifest import decode, run_part
from ..session import Session, Stored

Resume = str | Path | None
logger = logging.getLogger("heliograph")


def fetch(session: Session, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
    """Put the newest whole checkpoint that Ray has stored of a run into the run's folder, unless it lies there.

    Args:
        session: knows what is stored.
        store: the run's own, open.
        resume: what the run was told to resume.

    Returns:
        What it is to resume, and what there is to say.

    Raises:
        OSError: the storage cannot be read, or the folder not be written.
    """
    notes: list[str] = []
    newest: Entry | None = None  # of what is here by now
    for stored in session.stored():
        if not (stored.is_own or resume == "auto"):
            continue
        entries, are_all = _told(store, stored, notes)
        if not entries:
            continue
        here = _here(store, entries[-1], notes)
        found = [here] if here is not None else _fetched(store, stored, entries, notes)
        newest = max([*found, *([] if newest is None else [newest])], key=lambda each: each.order, default=None)
        if are_all and newest is not None and newest.order >= entries[-1].order:
            break
    if newest is not None:
        return newest.path, notes
    if session.is_restart and resume is None:
        notes.append(f"begins afresh: Ray's storage has no whole checkpoint of {store.run_name!r} from this call")
        logger.warning(notes[-1])
    return resume, notes


def _pass_over(stored: Stored, error: Exception, notes: list[str]) -> None:
    notes.append(f"passed over: {stored.name} in Ray's storage: {error}")
    logger.warning("resume %s", notes[-1])


def _told(store: Store, stored: Stored, notes: list[str]) -> tuple[list[Entry], bool]:
    """Return what the manifests of a run tell, the newest last, and whether all of them could be read."""
    entries, manifests = [], stored.manifests()
    damaged = [] if manifests else [ValueError("it has no manifest, as where its upload was cut short")]
    for name, content in manifests.items():
        try:
            entries.append(decode(content, store.folder / name))
        except ValueError as error:
            damaged.append(error)
    for each in damaged:
        _pass_over(stored, each, notes)
    own = [each for each in entries if each.run_name == store.run_name]
    return sorted(own, key=lambda each: each.order), not damaged


def _here(store: Store, entry: Entry, notes: list[str]) -> Entry | None:
    """Return what the run's own folder has of a checkpoint or of its successors, the newest that is whole.

    Only what is of the same training is taken for its successor: the folder may hold another's, of the same name.
    """
    own = [each for each in store.entries()[0] if each.training == entry.training]
    if not any((each.sequence, each.sha256) == (entry.sequence, entry.sha256) for each in own):
        return None
    for each in own:
        if each.sequence < entry.sequence:
            return None
        if not _is_whole(each):
            notes.append(f"passed over: {each.path} is damaged")
            continue
        if each.sequence > entry.sequence:
            notes.append(f"goes on from {each.path}, which is newer than what Ray's storage has")
        return each
    return None


def _fetched(store: Store, stored: Stored, entries: Sequence[Entry], notes: list[str]) -> list[Entry]:
    """Take in what is stored, and whole: the newest, and the best where it came along; return it."""
    whole = []
    own = {each.sha256: each for each in store.entries()[0]}
    with _folder(store) as folder:
        stored.fetch(folder)
        for entry in entries:
            place, twin = folder / entry.path.name, own.get(entry.sha256)
            try:
                storage.verify(place)
            except (ValueError, FileNotFoundError) as error:
                _pass_over(stored, error, notes)
                continue
            if twin is None or not _is_whole(twin):
                twin = store.take_in(place)
                notes.append(f"fetched {twin.path} from {stored.name} in Ray's storage")
            whole.append(twin)
    return whole


def _is_whole(entry: Entry) -> bool:
    try:
        storage.verify(entry.path)
    except (ValueError, FileNotFoundError):
        return False
    return True


@contextmanager
def _folder(store: Store) -> Iterator[Path]:
    """Have an empty folder beside the checkpoints, for what is fetched."""
    folder = store.folder / f".{run_part(store.run_name)}.fetched"
    if folder.exists():  # of a process that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
