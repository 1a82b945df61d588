"""How a restarted run finds its checkpoints in Ray's storage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from heliograph.spi import Entry, Store

from ..session import Session, StoredReport

Resume = str | Path | None
logger = logging.getLogger("heliograph")


def fetch_newest(session: Session, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
    """Copy the newest intact checkpoint of a run from Ray's storage to the run's folder, unless it is there.

    Args:
        session: lists the reports in the storage.
        store: the run's own, open.
        resume: the `resume=` of the run's `Checkpoint`.

    Returns:
        What the run has to resume, and notes about it.

    Raises:
        OSError: the storage cannot be read, or the folder not be written.
    """
    notes: list[str] = []
    newest: Entry | None = None  # of those in the run's folder by now
    for report in session.stored_reports():
        if not (report.is_own or resume == "auto"):
            continue
        entries, are_all = _read_manifests(store, report, notes)
        if not entries:
            continue
        local = _find_local(store, entries[-1], notes)
        found = [local] if local is not None else _fetch_intact(store, report, entries, notes)
        newest = max([*found, *([] if newest is None else [newest])], key=lambda each: each.order, default=None)
        if are_all and newest is not None and newest.order >= entries[-1].order:
            break
    if newest is not None:
        return newest.path, notes
    if session.is_restart and resume is None:
        notes.append(f"starts fresh: Ray's storage has no intact checkpoint of {store.run_name!r} from this call")
        logger.warning(notes[-1])
    return resume, notes


def _note_damaged(report: StoredReport, error: Exception, notes: list[str]) -> None:
    notes.append(f"skipped: {report.name} in Ray's storage: {error}")
    logger.warning("resume %s", notes[-1])


def _read_manifests(store: Store, report: StoredReport, notes: list[str]) -> tuple[list[Entry], bool]:
    """Return the run's checkpoints in a report, the newest last, and whether all manifests could be read."""
    manifests = report.manifests()
    damaged = [] if manifests else [ValueError("it has no manifest: its upload was interrupted")]
    entries = [each for each in manifests.values() if isinstance(each, Entry)]
    damaged += [each for each in manifests.values() if isinstance(each, ValueError)]
    for each in damaged:
        _note_damaged(report, each, notes)
    own = [each for each in entries if each.family == store.run_name]
    return sorted(own, key=lambda each: each.order), not damaged


def _find_local(store: Store, entry: Entry, notes: list[str]) -> Entry | None:
    """Return the newest intact one of a checkpoint and its successors in the run's folder; None without the checkpoint.

    Successors are of the same training; the folder may also hold checkpoints of another one with the same name.
    """
    own = [each for each in store.entries()[0] if each.training == entry.training]
    if not any((each.sequence, each.sha256) == (entry.sequence, entry.sha256) for each in own):
        return None
    for each in own:
        if each.sequence < entry.sequence:
            return None
        if not _is_intact(store, each):
            notes.append(f"skipped: {each.path} is damaged")
            continue
        if each.sequence > entry.sequence:
            notes.append(f"resumes {each.path}, which is newer than what Ray's storage has")
        return each
    return None


def _fetch_intact(store: Store, report: StoredReport, entries: Sequence[Entry], notes: list[str]) -> list[Entry]:
    """Copy the intact checkpoints of a report to the run's folder, the newest and the best; return them."""
    intact = []
    own = {each.sha256: each for each in store.entries()[0]}
    with _temporary_folder(store) as folder:
        report.fetch(folder)
        for entry in entries:
            path, copy = folder / entry.path.name, own.get(entry.sha256)
            try:
                store.verify(path)
            except (ValueError, FileNotFoundError) as error:
                _note_damaged(report, error, notes)
                continue
            if copy is None or not _is_intact(store, copy):
                copy = store.take_in(path)
                notes.append(f"fetched {copy.path} from {report.name} in Ray's storage")
            intact.append(copy)
    return intact


def _is_intact(store: Store, entry: Entry) -> bool:
    try:
        store.verify(entry.path)
    except (ValueError, FileNotFoundError):
        return False
    return True


@contextmanager
def _temporary_folder(store: Store) -> Iterator[Path]:
    """Yield an empty folder beside the checkpoints, and remove it after the context."""
    folder = store.scratch("fetched")
    if folder.exists():  # of a process that was killed
        shutil.rmtree(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
