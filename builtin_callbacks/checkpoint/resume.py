"""The states that a run loads: the checkpoint that it resumes, on every rank, and the best one at its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from errno import errorcode
from functools import partial
from math import isnan
from pathlib import Path
from typing import Literal

from ...core.checkpoint import conversion, storage
from ...core.checkpoint.state.compatibility import load_scheduler
from ...core.checkpoint.state.frozen import with_frozen
from ...core.checkpoint.state.ranks import load_parts
from ...core.checkpoint.storage import State
from ...core.checkpoint.storage.files import TRIES
from ...core.checkpoint.storage.manifest import MissingManifestError
from ...core.checkpoint.storage.reader import OfOthers
from ...core.checkpoint.weights import share
from ...core.distributed.ranks.failure import on_main
from ...core.engines.weights import load_average, measured_average
from ...core.metrics.monitor import Monitor
from ...core.settings import DEFAULTS
from ...events import Engine, Run
from ...events.run import CheckpointSource
from .retention import by_training

UNSAVED_FORK = ".unsaved-fork"  # lies in the folder of a fork until its first save, and says what the fork is

logger = logging.getLogger("heliograph")
Extent = Literal["weights", "everything"]


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
    state = conversion.load_any(path)
    try:
        manifest = storage.read_manifest(path)
    except MissingManifestError:
        return ResumePoint(path, state, state["run_name"], state["run_name"], notes)
    return ResumePoint(path, state, manifest.run_name, manifest.family, notes)


def _find_newer(store: storage.Store, point: ResumePoint) -> None:
    """Find the newest intact checkpoint of the same training, unless that is the one to resume."""
    assert point.state is not None
    for entry in store.entries()[0]:
        if entry.training != point.state["training_id"]:
            continue
        if entry.saved_at == point.state.get("saved_at"):
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
    older = None if entry is not None else conversion.newest_of_helios(store.folder, store.run_name)
    for line in passed_over:
        if older is None or str(older[0]) not in line:
            notes.append(f"skipped: {line}")
            level = logging.INFO if isinstance(line, OfOthers) else logging.WARNING
            logger.log(level, "resume skipped: %s", line)
    if entry is not None:
        entries, _ = store.entries()
        damaged = [each.path for each in entries if each.order > entry.order and each.training == entry.training]
        lost = [(each.path, each.head) for each in store.lost() if each.head is not None]
        damaged += [path for path, head in lost if head.training == entry.training and head.saved_at > entry.saved_at]
        notes += _several(store, entries, entry)
        return ResumePoint(entry.path, state, entry.run_name, entry.family, notes, damaged, _newer(entry, damaged))
    if older is not None:
        return ResumePoint(*older, store.run_name, store.run_name, notes)
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
    others = next((line for line in passed_over if isinstance(line, OfOthers)), None)
    if others is None or store.run_name != DEFAULTS["name"]:
        return ""
    return (
        f"Nothing was resumed, and fit was given no name=: {others} To continue one of those, give fit its name=; to "
        f"begin another training there, give it a name of its own."
    )


def _unusable(store: storage.Store) -> str | None:
    """Return how many checkpoints resume='auto' might have continued from, and whose they are; None for no such."""
    entries, _ = store.entries()
    newest = store.newest_training()
    of_others = sum(each.training != newest for each in entries)
    number, training = store.count() - of_others, "the newest training of " if of_others else ""
    return f"{number} checkpoints of {training}{store.run_name!r}" if number else None


def _refuse_another_s_name(store: storage.Store) -> None:
    """Raise where a training writes under the name that this run was given, but was asked for by another one."""
    written, _ = store.under(store.run_name)
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
    shared, is_sent = share(engine, path, state, partial(conversion.load_any, path, with_shards=False))
    if is_sent and "shards" in shared:
        raise ValueError(f"Not every rank sees the checkpoint {path}: its shards must lie where all ranks read.")
    return shared


def check_best(keep_best: int, monitor: str | None, mode: str | None, load_best: str | None, *, required: bool) -> None:
    """Raise ValueError unless the arguments of a `Checkpoint` about the best ones fit together.

    Args:
        keep_best: how many are kept.
        monitor: what they are chosen by; None for nothing.
        mode: which way that is better, as it was given.
        load_best: what is loaded back at the end; None for nothing.
        required: whether a run in which nothing can measure the metric is an error.
    """
    if mode is not None and monitor is None:
        raise ValueError(f"mode={mode!r} says which way monitor='validation/loss' is better: give that, too.")
    if load_best not in (None, "weights", "everything"):
        raise ValueError(f"load_best is 'weights', 'everything' or None, got {load_best!r}.")
    if load_best is not None and monitor is None:
        raise ValueError(f"load_best={load_best!r} needs keep_best=1 and monitor='validation/loss': the best of what?")
    if load_best is not None and not required:
        raise ValueError(f"load_best={load_best!r} needs a best checkpoint: leave monitor_required=False out.")
    if keep_best and monitor is None:
        raise ValueError(
            f"keep_best={keep_best} does not say the best of what: give the metric, as in monitor='validation/loss'."
        )
    if monitor is not None and not keep_best:
        raise ValueError(
            f"monitor={monitor!r} is what the best are chosen by, and keep_best=0 keeps none: give keep_best=1, or "
            f"leave monitor out."
        )


def load_best(run: Run, best: storage.Entry | None, monitor: Monitor, extent: Extent) -> str:
    """Give a run's task, optimizers and schedulers the state of its best checkpoint; return what was done, if anything.

    Where a plugin validates with weights of its own, such as an average, these are loaded: they were judged.

    On several ranks a collective.

    Args:
        run: the run, at the end of its training.
        best: on the main rank, the checkpoint as it was ranked; None or one that was judged NaN is none to load.
        monitor: what it was ranked by.
        extent: only the weights, or the optimizers and the schedulers too.

    Raises:
        FileNotFoundError: it is gone.
        ValueError: it is damaged, or no longer the one that was ranked.
    """
    states: list[State] = []
    best = on_main(run.engine, partial(_check, best, states))
    if best is None or best.judged_by is None:
        return ""
    saved = with_frozen(share_state(run.engine, best.path, next(iter(states), None)), run.modules)
    context = run
    optimizers = context.optimizers if extent == "everything" else {}
    load_parts(context, saved, optimizers, best.path)
    for name, scheduler in context.schedulers.items() if extent == "everything" else ():
        load_scheduler(name, scheduler, saved)
    average = measured_average(saved) if monitor.split == "validation" else None
    if average is not None:
        load_average(run.modules, saved, average)
    of = extent if average is None else f"{extent} averaged by {average!r}"
    return f"loaded back at the end: {of} of the best checkpoint {best.path}, {monitor.name} {best.judged_by[2]:.6g}"


def _check(best: storage.Entry | None, states: list[State]) -> storage.Entry | None:
    """Return the checkpoint where it is one to load, and add its state to what was read."""
    value = None if best is None or best.judged_by is None else best.judged_by[2]
    if best is None or value is None or isnan(value):
        return None
    state = storage.load(best.path)
    now = storage.read_manifest(best.path)
    if (now.sha256, now.judged_by) != (best.sha256, best.judged_by):
        raise ValueError(
            f"{best.path} is not the checkpoint that was ranked best by {best.judged_by}: another was put in its "
            f"place, judged by {now.judged_by}. Nothing was loaded."
        )
    states.append(state)
    return best
