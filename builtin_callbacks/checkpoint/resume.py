"""The search for the checkpoint that a run resumes, and the name of a run beside other trainings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from errno import errorcode
from functools import partial
from itertools import count
from pathlib import Path

from ...core.checkpoint import storage
from ...core.checkpoint.schema import State
from ...core.checkpoint.storage.files import TRIES
from ...core.checkpoint.storage.inventory import OtherRunsNote
from ...core.checkpoint.storage.reader import load, shared_by_ranks, verify
from ...core.settings import DEFAULTS
from ...events import Engine
from ...events.run import CheckpointSource

UNSAVED_FORK = ".unsaved-fork"  # describes a fork in its folder until its first save

logger = logging.getLogger("heliograph")


def by_training(entries: Iterable[storage.Entry]) -> list[list[storage.Entry]]:
    trainings: dict[str, list[storage.Entry]] = {}
    for entry in entries:
        trainings.setdefault(entry.training, []).append(entry)
    return list(trainings.values())


@dataclass(slots=True)
class ResumePoint:
    """The checkpoint that a run resumes.

    Attributes:
        path: the checkpoint, None if there is none.
        state: its content.
        name: the prefix of its training's files.
        asked_name: the name that the program gave the run.
        notes: notes on the search.
        damaged: newer checkpoints that cannot be read.
        warning: why an expected checkpoint is not resumed; empty if there is none.
        sha256: the digest in its manifest; empty without one.
        newer: another checkpoint of the same training in the folder, from which the run does not continue; empty if
            there is none.
    """

    path: Path | None = None
    state: State | None = None
    name: str = ""
    asked_name: str = ""
    notes: list[str] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)
    warning: str = ""
    sha256: str = ""
    newer: str = ""

    def choose_training(self, run_name: str, fresh_id: str) -> tuple[str, str, list[str]]:
        """Return the id and the name of the training that a run of this name continues, and notes.

        A checkpoint of a run of another name, or one that is not the newest of its training in the folder, starts a new
        training: the existing checkpoints are neither overwritten nor removed.

        Args:
            run_name: the name that the program gives the run.
            fresh_id: the id of a new training.
        """
        if self.path is None or self.state is None:
            return fresh_id, run_name, self.notes
        if self.asked_name == run_name and not self.newer:
            return self.state["training_id"], self.name, self.notes
        note = f"{self.path} is of run {self.asked_name!r}: run {run_name!r} starts a new training from it"
        if self.newer:
            step = self.state["progress"]["steps"]
            note = f"branched from {self.path} at step {step} into a new training: {self.newer} of its training is kept"
        return fresh_id, run_name, [*self.notes, note]


def find(store: storage.Store, resume: str | Path | None, source: CheckpointSource | None = None) -> ResumePoint:
    """Find the checkpoint that a run resumes.

    Args:
        store: the store of the run, for `auto`.
        resume: None, `auto` or a path.
        source: another place with checkpoints of the run, which has priority.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: a file that may be a checkpoint of the run cannot be read, not even when retried.
        ValueError: it is damaged, or has another schema.
    """
    try:
        chosen, notes = (resume, []) if source is None else source.fetch(store, resume)
        if chosen is None:
            return ResumePoint(notes=notes)
        if chosen == "auto":
            return _newest(store, notes)
        point = _read_point(Path(chosen), notes)
        if chosen == resume:  # a source fetches only the newest
            _find_newer(store, point)
        return point
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable_error(error, resume, store.folder) from error


def _read_point(path: Path, notes: list[str]) -> ResumePoint:
    state, manifest = load(path), storage.read_manifest(path)
    return ResumePoint(path, state, manifest.run_name, manifest.family, notes, sha256=manifest.sha256)


def _find_newer(store: storage.Store, point: ResumePoint) -> None:
    assert point.state is not None
    for entry in store.entries()[0]:
        if entry.training != point.state["training_id"]:
            continue
        if entry.sha256 == point.sha256:
            return
        try:
            verify(entry.path)
        except ValueError as error:
            point.damaged.append(entry.path)
            point.notes.append(f"skipped: {error}")
            continue
        except OSError as error:  # it may be intact
            point.notes.append(f"{entry.path} cannot be read: {error}")
        point.newer = entry.path.name
        return


def _newest(store: storage.Store, notes: list[str]) -> ResumePoint:
    entry, state, passed_over = store.newest()
    for line in passed_over:
        notes.append(f"skipped: {line}")
        level = logging.INFO if isinstance(line, OtherRunsNote) else logging.WARNING
        logger.log(level, "resume skipped: %s", line)
    if entry is not None:
        entries, _ = store.entries("recent")
        damaged = [newer.path for newer in entries if newer.order > entry.order and newer.training == entry.training]
        lost = [(file.path, file.head) for file in store.lost("recent") if file.head is not None]
        damaged += [path for path, head in lost if head.training == entry.training and head.saved_at > entry.saved_at]
        notes += _note_other_trainings(store, entries, entry)
        warning = (
            f"Newer checkpoints than {entry.path.name} cannot be used, and their steps are lost: "
            f"{', '.join(path.name for path in damaged)}."
        )
        names = entry.run_name, entry.family
        return ResumePoint(entry.path, state, *names, notes, damaged, warning if damaged else "")
    _refuse_name_of_another_run(store)
    _refuse_unsaved_fork(store.folder)
    if store.entries()[0] or store.lost() or store.under(store.run_name)[1]:
        note = f"starts fresh: none of the checkpoints of {store.run_name!r} in {store.folder} is usable"
        logger.warning(note)
        warning = " ".join([f"Nothing was resumed: the run {note}.", *passed_over[:1]])
        return ResumePoint(notes=[*notes, note], warning=warning)
    fresh = f"starts fresh: no checkpoint of {store.run_name!r} in {store.folder}"
    return ResumePoint(notes=[*notes, fresh], warning=_forgotten_name(store, passed_over))


# A run without a name finds only runs with names. A run with a name starts fresh beside others without a warning.
def _forgotten_name(store: storage.Store, passed_over: Sequence[str]) -> str:
    other_runs = next((line for line in passed_over if isinstance(line, OtherRunsNote)), None)
    if other_runs is None or store.run_name != DEFAULTS["name"]:
        return ""
    return (
        f"Nothing was resumed, and fit has no name=: {other_runs} To continue one of them, pass its name= to fit; to "
        f"start another training there, pass a new name."
    )


def _refuse_name_of_another_run(store: storage.Store) -> None:
    written, _, _ = store.under(store.run_name)
    if other_entries := [entry for entry in written if entry.family != store.run_name]:
        newest = max(other_entries, key=lambda entry: entry.order)
        raise ValueError(
            f"resume='auto' finds no checkpoint of a run {store.run_name!r} in {store.folder}, but a training of "
            f"run {newest.family!r} writes there under that name. To continue it, set name={newest.family!r} or "
            f"resume={str(newest.path)!r}; to start another training, set resume=None."
        )


def _refuse_unsaved_fork(folder: Path) -> None:
    # a fresh start would lose the fork's parent and its change
    mark = folder / UNSAVED_FORK
    if mark.exists():
        raise ValueError(
            f"resume='auto' finds no checkpoint in {folder}: it belongs to {mark.read_text()}, which ended before its "
            f"first save. Fork it again; to start another training there, set resume=None."
        )


def _unreadable_error(error: OSError, resume: str | Path | None, folder: Path) -> OSError:
    kind, asked = errorcode.get(error.errno or 0, type(error).__name__), resume and str(resume)
    return OSError(
        error.errno,
        f"resume={asked!r} finds no checkpoint, because {error.filename or folder} cannot be read, in {TRIES} tries: "
        f"{error.strerror or error} ({kind}). Nothing was started, skipped or removed. Start again when it is "
        f"readable, or set resume= to the path of another checkpoint, or to None for a new training beside the "
        f"existing files.",
    )


def _note_other_trainings(store: storage.Store, entries: Sequence[storage.Entry], chosen: storage.Entry) -> list[str]:
    newest = [training[0] for training in by_training(entries)]
    other_entries = [entry for entry in newest if entry.training != chosen.training]
    if not other_entries:
        return []
    names = ", ".join(f"{entry.run_name!r} ({entry.path.name})" for entry in other_entries)
    note = (
        f"{len(newest)} trainings in {store.folder} have the name {store.run_name!r}: this run continues "
        f"{chosen.run_name!r}, from {chosen.path.name}, and does not change {names}; to continue one of those, set its "
        f"path, resume={str(other_entries[0].path)!r}"
    )
    logger.warning(note)
    return [note]


def share_state(engine: Engine, path: Path, state: State | None) -> State:
    """Return on every rank the state that the main rank has read from a checkpoint, without shards. A collective.

    The main rank has verified the shards for all.

    Args:
        engine: connects the ranks.
        path: the checkpoint.
        state: on the main rank, its content.

    Raises:
        ValueError: a rank cannot read it; raised on all ranks.
    """
    shared, is_sent = shared_by_ranks(engine, path, state, partial(load, path, with_shards=False))
    if is_sent and "shards" in shared:
        raise ValueError(
            f"Not every rank sees the checkpoint {path}: move its shards to a folder that all ranks can read."
        )
    return shared


def settle_conflict(
    store: storage.Store, training_id: str, wanted: str, on_existing: str
) -> tuple[list[str], list[storage.Entry]]:
    """Choose a name for a training beside other trainings; for the arguments see `claim_name`."""
    named_entries, _, number = store.under(wanted)
    other_entries = [entry for entry in named_entries if entry.training != training_id]
    newest = max(other_entries, key=lambda entry: entry.order, default=None)
    description = "without a usable manifest" if newest is None else f"in total, the newest is {newest.path.name}"
    conflict = f"{store.folder} holds another training under the name {wanted!r} ({number} {description})"
    if on_existing == "refuse":
        raise ValueError(
            f"{conflict}, and on_existing='refuse'. Continue it with resume='auto'; give this run another name= or "
            f"folder; or choose on_existing='new_name', which keeps it and adds a number to the name of this run, or "
            f"'replace', which removes it when the first checkpoint of this run is written."
        )
    if on_existing == "replace":
        store.write_as(training_id, wanted)
        named_entries = [entry for entry in store.entries()[0] if entry.run_name == wanted and entry.is_removable]
        removable = [entry for entry in named_entries if entry.training != training_id]
        number = len(removable)
        note = f"{conflict}: {number} are removed when the first one of this run is written, on_existing='replace'"
    else:
        names = (f"{wanted}-{number}" for number in count(2))
        name, removable = next(name for name in names if _is_free(store, name, training_id)), []
        store.write_as(training_id, name)
        note = f"{conflict}: it is kept, and this run is written as {name!r}"
    logger.warning(note)
    return [note], removable


def _is_free(store: storage.Store, name: str, training_id: str) -> bool:
    entries, _, number = store.under(name)
    return number == len(entries) and all(entry.training == training_id for entry in entries)
