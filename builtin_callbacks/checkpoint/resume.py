"""What a run resumes, and how: `Resume`, and the search for the checkpoint that it means."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import errorcode
from functools import partial
from pathlib import Path

from ...core.checkpoint import storage
from ...core.checkpoint.state.compatibility import CHANGES, BatchChange
from ...core.checkpoint.storage import State
from ...core.checkpoint.storage.files import TRIES
from ...core.checkpoint.storage.reader import OtherRunsNote, newest_training
from ...core.checkpoint.weights import shared_by_ranks
from ...core.settings import DEFAULTS
from ...events import Engine
from ...events.run import CheckpointSource
from .folder import ON_EXISTING, OnExisting
from .retention import by_training

UNSAVED_FORK = ".unsaved-fork"  # lies in the folder of a fork until its first save, and says what the fork is

logger = logging.getLogger("heliograph")


@dataclass(frozen=True, slots=True)
class Resume:
    """What a `Checkpoint` resumes, and how: `Checkpoint("runs/x", resume=Resume("auto", batch_change="linear"))`.

    `resume="auto"` is `Resume("auto")`, and so with a path.

    Args:
        path: `auto` resumes the newest intact checkpoint of this run's name, if there is one, and notes what it
            skipped; a path resumes that file, as a branch if the folder has a newer checkpoint of its training; None
            starts fresh.
        batch_change: what to do if the resumed run has another global batch (ranks x batch size x accumulation):
            `refuse` it, unless one process resumes one, which the result notes; `keep` the learning rates as they were
            saved; scale them in proportion (`linear`) or with the square root (`sqrt`) of the ratio. If the batch size
            is unknown, nothing is refused or scaled.
        on_existing: what a run that starts fresh does if the folder holds another training under the run's name: write
            under a `new_name` (`run-2`, and the result says so), `refuse` to begin, or `replace` it: its checkpoints
            are removed when the first one of this run is written, unless they are pinned.

    Raises:
        TypeError: `path` is not a path.
        ValueError: an option is unknown, or `path` is neither a file nor the name of one.
    """

    path: str | Path | None = "auto"
    batch_change: BatchChange = "refuse"
    on_existing: OnExisting = "new_name"

    def __post_init__(self) -> None:
        path = self.path
        if not isinstance(path, str | Path | None):
            raise TypeError(f"resume is 'auto', the path of a checkpoint, a Resume, or None; got {path!r}.")
        if isinstance(path, str) and path != "auto" and not Path(path).suffix and not Path(path).exists():
            raise ValueError(f"resume is None, 'auto', or the path of a checkpoint's .pth file, got {path!r}.")
        if self.batch_change not in CHANGES:
            raise ValueError(f"batch_change is one of {', '.join(CHANGES)}; got {self.batch_change!r}.")
        if self.on_existing not in ON_EXISTING:
            raise ValueError(f"on_existing is one of {', '.join(ON_EXISTING)}; got {self.on_existing!r}.")


@dataclass(slots=True)
class ResumePoint:
    """What there is to resume.

    Attributes:
        path: the checkpoint, None where there is none.
        state: what is in it.
        name: under which name its training was written.
        asked_name: the name that the program gave the run then.
        notes: what there is to say of the search.
        damaged: newer checkpoints, which cannot be read.
        warning: what was to be resumed and is not; empty for nothing.
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
        """Return which training a run of this name continues, under which name, and what there is to say.

        A new training begins from a checkpoint of a run of another name, and from one that is not the newest of its
        training in the folder: the existing checkpoints are neither overwritten nor removed.

        Args:
            run_name: the name that the program gives the run.
            fresh_id: the identity of a training of its own.
        """
        if self.path is None or self.state is None:
            return fresh_id, run_name, self.notes
        if self.asked_name == run_name and not self.newer:
            return self.state["training_id"], self.name, self.notes
        note = f"{self.path} is of run {self.asked_name!r}: run {run_name!r} begins there as a training of its own"
        if self.newer:
            step = self.state["progress"]["steps"]
            note = f"branched from {self.path} at step {step} into a new training: {self.newer} of its training stays"
        return fresh_id, run_name, [*self.notes, note]


def find(store: storage.Store, resume: str | Path | None, source: CheckpointSource | None = None) -> ResumePoint:
    """Look for what a run is to resume.

    Args:
        store: the run's own, for `auto`.
        resume: None, `auto` or a path.
        source: where else checkpoints of the run may lie; what it has goes before.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the system refuses to read what may be a checkpoint of the run, also when that is tried again.
        ValueError: it is damaged, or has another schema.
    """
    try:
        chosen, notes = (resume, []) if source is None else source.fetch(store, resume)
        if chosen is None:
            return ResumePoint(notes=notes)
        if chosen == "auto":
            return _newest(store, notes)
        point = _given(Path(chosen), notes)
        if chosen == resume:  # a source fetches the one to continue
            _find_newer(store, point)
        return point
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refusal(error, resume, store.folder) from error


def read(path: Path) -> None:
    """Read a checkpoint as a resume does, and leave it; see `find` for what it raises."""
    _given(path, [])


def _given(path: Path, notes: list[str]) -> ResumePoint:
    state, manifest = storage.load(path), storage.read_manifest(path)
    return ResumePoint(path, state, manifest.run_name, manifest.family, notes, sha256=manifest.sha256)


def _find_newer(store: storage.Store, point: ResumePoint) -> None:
    """Find the newest intact checkpoint of the same training, unless that is the one to resume."""
    assert point.state is not None
    for entry in store.entries()[0]:
        if entry.training != point.state["training_id"]:
            continue
        if entry.sha256 == point.sha256:
            return
        try:
            storage.verify(entry.path)
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
        damaged = [each.path for each in entries if each.order > entry.order and each.training == entry.training]
        lost = [(each.path, each.head) for each in store.lost("recent") if each.head is not None]
        damaged += [path for path, head in lost if head.training == entry.training and head.saved_at > entry.saved_at]
        notes += _several(store, entries, entry)
        return ResumePoint(entry.path, state, entry.run_name, entry.family, notes, damaged, _newer(entry, damaged))
    _refuse_another_s_name(store)
    _refuse_unsaved_fork(store.folder)
    if unusable := _unusable(store):
        note = f"starts fresh: none of the {unusable} in {store.folder} can be used"
        logger.warning(note)
        warning = " ".join([f"Nothing was resumed: the run {note}.", *passed_over[:1]])
        return ResumePoint(notes=[*notes, note], warning=warning)
    fresh = f"starts fresh: no checkpoint of {store.run_name!r} in {store.folder}"
    return ResumePoint(notes=[*notes, fresh], warning=_forgotten_name(store, passed_over))


def _newer(entry: storage.Entry, damaged: Sequence[Path]) -> str:
    """Return what to say of newer checkpoints of the training that cannot be used; empty if there are none."""
    if not damaged:
        return ""
    return (
        f"Newer checkpoints than {entry.path.name} cannot be used, and their steps are lost: "
        f"{', '.join(path.name for path in damaged)}."
    )


def _forgotten_name(store: storage.Store, passed_over: Sequence[str]) -> str:
    """Return what to say where a run without a name finds only runs that have one; empty for nothing.

    A run that is given a name is expected to find only others when it first begins in their folder.
    """
    others = next((line for line in passed_over if isinstance(line, OtherRunsNote)), None)
    if others is None or store.run_name != DEFAULTS["name"]:
        return ""
    return (
        f"Nothing was resumed, and fit was given no name=: {others} To continue one of those, give fit its name=; to "
        f"begin another training there, give it a name of its own."
    )


def _unusable(store: storage.Store) -> str | None:
    """Return how many checkpoints resume='auto' might have continued from, and whose they are; None for no such."""
    entries, lost = store.entries()[0], store.lost()
    newest = newest_training(entries, lost)
    own = [each for each in entries if each.training == newest]
    number = len(own) + len({each.path for each in (*lost, *store.under(store.run_name)[1])})
    training = "the newest training of " if len(own) < len(entries) else ""
    return f"{number} checkpoints of {training}{store.run_name!r}" if number else None


def _refuse_another_s_name(store: storage.Store) -> None:
    """Raise where a training writes under the name that this run was given, but was asked for by another one."""
    written, _, _ = store.under(store.run_name)
    if others := [each for each in written if each.family != store.run_name]:
        newest = max(others, key=lambda each: each.order)
        raise ValueError(
            f"resume='auto' finds no checkpoint of a run {store.run_name!r} in {store.folder}, but a training that was "
            f"asked for as {newest.family!r} writes there under that name. To continue it, give the run "
            f"name={newest.family!r}, or resume={str(newest.path)!r}; to begin another training, resume=None."
        )


def _refuse_unsaved_fork(folder: Path) -> None:
    """Raise where a fork has ended before its first save: to start fresh there would lose its parent and its change."""
    mark = folder / UNSAVED_FORK
    if mark.exists():
        raise ValueError(
            f"resume='auto' finds no checkpoint in {folder}: there is {mark.read_text()}, which ended before it was "
            f"saved. Fork it again; to begin another training there, give resume=None."
        )


def _refusal(error: OSError, resume: str | Path | None, folder: Path) -> OSError:
    """Return what to say where the system refuses to read: what is there is unknown then, so nothing is started."""
    kind, asked = errorcode.get(error.errno or 0, type(error).__name__), resume and str(resume)
    return OSError(
        error.errno,
        f"resume={asked!r} cannot find what to resume: {error.filename or folder} cannot be read, in {TRIES} "
        f"tries: {error.strerror or error} ({kind}). Nothing was begun, skipped or removed. Start again when it is "
        f"readable; give resume= the path of another checkpoint; or begin another training with resume=None, which "
        f"leaves all there as it is.",
    )


def _several(store: storage.Store, entries: Sequence[storage.Entry], chosen: storage.Entry) -> list[str]:
    """Return what there is to say where several trainings were asked for by one name."""
    newest = [each[0] for each in by_training(entries)]
    others = [each for each in newest if each.training != chosen.training]
    if not others:
        return []
    names = ", ".join(f"{each.run_name!r} ({each.path.name})" for each in others)
    note = (
        f"{len(newest)} trainings in {store.folder} were asked for as {store.run_name!r}: this run continues "
        f"{chosen.run_name!r}, from {chosen.path.name}, and leaves alone {names}; to continue one of those, give its "
        f"path, resume={str(others[0].path)!r}"
    )
    logger.warning(note)
    return [note]


def share_state(engine: Engine, path: Path, state: State | None) -> State:
    """Return on every rank the state that the main rank has read from a checkpoint, without shards. A collective.

    The shards were verified by the main rank, for all.

    Args:
        engine: connects the ranks.
        path: the checkpoint.
        state: on the main rank, what is in it.

    Raises:
        ValueError: a rank cannot read it; on all of them.
    """
    shared, is_sent = shared_by_ranks(engine, path, state, partial(storage.load, path, with_shards=False))
    if is_sent and "shards" in shared:
        raise ValueError(f"Not every rank sees the checkpoint {path}: its shards must lie where all ranks read.")
    return shared
