"""Report a run's metrics and checkpoints to Ray, so that a restarted run can resume from Ray's storage."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic

import heliograph as h
from heliograph.spi import Entry, Store, check_number, on_main, read_manifest

from .session import Notice, Session, current_session
from .storage import StoredFolder

Resume = str | Path | None
logger = logging.getLogger("heliograph")
EXIT_STATUS = 143  # 128 + SIGTERM


class RayReport(h.Plugin):
    """Report metrics and checkpoints to Ray.

    A restarted run resumes from Ray's storage.

    The launcher and the search for Ray add this plugin to every trainer that lacks it. Outside of Ray it does nothing.

    A checkpoint is reported at `CheckpointSaved`; a validation at the next batch or epoch; a `Log` likewise, but not
    sooner than `interval` after the last report. Unreported metrics are reported when the run ends. A report has the
    latest value of all metrics, with `epoch` and `step`. The report of a checkpoint has the metrics and files of the
    checkpoint, including shards, all of which the main rank must be able to read, and the best checkpoint. The loop
    waits until Ray has stored them; an error of the storage fails the run.

    If a worker was lost or the number of workers changed, the restarted run resumes the newest intact checkpoint of its
    name that this call has reported, whatever `resume=` of its `Checkpoint` is; with `resume="auto"`,
    also one that an earlier call has reported. It is copied to the folder of the `Checkpoint`, unless that folder has
    it or a newer one, which is then resumed instead. Several trainings in one function therefore need different names,
    and a storage that keeps the last checkpoint of each: `RayLauncher(keep=None)`.

    If a machine will be taken away, the run saves and stops, and the process exits with status 143. If Ray ends the
    run, it stops.

    Args:
        interval: the minimum number of seconds between a report and the report of the next `Log`.

    Raises:
        ValueError: `interval` is not a finite number of at least 0; at a save, files of the checkpoint are missing.
        OSError: the storage cannot be written or read.
    """

    patience = 30.0  # seconds for workers that Ray has ended to exit and release the checkpoint folder
    affects_training = False
    exclusive = ("ray_report",)  # no asks: it requests saves and stops only when a machine is taken away
    rehearses = False  # what is reported to Ray stays there

    def __init__(self, interval: float = 10.0) -> None:
        self.interval = float(check_number("interval", interval, of="seconds", at_least=0))
        self._session: Session | None = None
        self._unreported: dict[str, float] | None = None  # the latest metrics
        self._reported_at = -math.inf
        self._is_due = self._has_checkpoints = self._has_started = self._is_exiting = False
        self._notice: Notice | None = None

    @h.on(h.TrainStart, lane=h.Lane.TRANSFORM)
    def begin(self, run: h.Run, event: h.TrainStart) -> None:
        """Reset, and make Ray's storage the source of checkpoints."""
        if run.report.is_replay:
            raise h.NotRecorded("the answers of Ray")
        self._session = current_session()
        self._reset()
        if self._session is not None:
            run.checkpoints.source = self

    def fetch(self, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
        """Copy the checkpoint to resume to the run's folder; return it, and notes about it."""
        assert self._session is not None
        self._has_checkpoints = True
        return fetch_newest(self._session, store, resume)

    @h.on(h.EpochStart, h.TrainEnd)
    def record_start(self, run: h.Run, event: h.EpochStart | h.TrainEnd) -> None:
        """Record the start of the training."""
        if self._session is None or self._has_started:
            return
        self._has_started = True
        self._session.record_start(run.name, run.origin, run.checkpoints.resumed_from)
        if run.engine.is_main and not self._has_checkpoints:
            run.note("no plugin saves checkpoints: if a worker is lost, the run starts fresh. Add a Checkpoint.")

    @h.on(h.EpochStart, h.BatchEnd)
    def check(self, run: h.Run, event: h.EpochStart | h.BatchEnd) -> None:
        """Update the progress, send a pending report, and exit if the machine will be taken away."""
        session = self._session
        if session is None:
            return
        session.update_progress(run.name, run.progress)
        if self._is_due:
            self._report(run)
        if isinstance(event, h.BatchEnd):  # EpochStart has no boundary: a save there would create one
            self._request_exit(run, session)

    @h.on(h.CheckpointLoaded)
    def check_again(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        """Repeat the requests after a rollback, which drops the request to save."""
        self._is_exiting = False
        if self._session is not None:
            self._request_exit(run, self._session)

    @h.on(h.ValidationStart, h.ValidationBatchEnd, optional=True)
    def cut_validation(self, run: h.Run, event: h.ValidationStart | h.ValidationBatchEnd) -> None:
        """Postpone a validation if the machine will be taken away."""
        if self._session is not None and run.optimizer is not None and (notice := self._session.notice()) is not None:
            run.control.cut_validation(notice.reason, by=notice.by)

    @h.on(h.Log, h.ValidationEnd, lane=h.Lane.REPORT, optional=True)
    def collect(self, run: h.Run, event: h.Log | h.ValidationEnd) -> None:
        """Collect the metrics to report, after all handlers that add to them."""
        if self._session is None or run.optimizer is None:
            return
        self._unreported = {**run.metrics, **event.metrics, "epoch": run.progress.epoch, "step": run.progress.steps}
        self._is_due = self._is_due or isinstance(event, h.ValidationEnd) or self._is_log_due(run)

    @h.on(h.CheckpointSaved, lane=h.Lane.REPORT)
    def report_checkpoint(self, run: h.Run, event: h.CheckpointSaved) -> None:
        """Report a checkpoint, with the metrics that it was saved with."""
        if self._session is None:
            return
        if run.engine.world_size > 1 and run.report.has_left_group:
            run.note(f"{event.path} is not in Ray's storage: the process group ended before it was reported")
            return
        folder, metrics, has_all = on_main(run.engine, partial(self._stage, run, event.path))
        if folder is None:  # a trial cannot resume a file with only weights
            return
        try:
            self._send(run, metrics, folder if run.engine.is_main else None)
        finally:
            if run.engine.is_main:
                shutil.rmtree(folder)
        if has_all:
            self._unreported, self._is_due = None, False

    @h.on(h.RunClosed, lane=h.Lane.REPORT)
    def end(self, run: h.Run, event: h.RunClosed) -> None:
        """Report the remaining metrics, and record the notice if the run ended because of one."""
        session = self._session
        if session is None or run.optimizer is None:
            return
        if event.status in ("completed", "stopped") and not run.report.has_left_group:
            if self._unreported is not None:
                self._report(run)
            if event.status == "stopped":
                self._record_exit(run, session)
        self._session = None

    def _reset(self) -> None:
        self._unreported, self._reported_at, self._notice = None, -math.inf, None
        self._is_due = self._has_checkpoints = self._has_started = self._is_exiting = False

    def _stage(self, run: h.Run, path: Path) -> tuple[Path | None, dict[str, float], bool]:
        if read_manifest(path).weights_only:
            return None, {}, False
        best = run.checkpoints.best
        if best is not None and read_manifest(best).weights_only:
            best = None
        folder, metrics = stage_report(run.name, path, best)
        return folder, metrics, self._unreported is not None and contains_all(metrics, self._unreported)

    def _request_exit(self, run: h.Run, session: Session) -> None:
        if self._is_exiting or (notice := session.notice()) is None:
            return
        self._is_exiting, self._notice = True, notice
        logger.warning("%s: run %r saves and stops", notice.reason, run.name)
        run.control.request_save(notice.reason, by=notice.by, required=True)
        run.control.stop(notice.reason, by=notice.by, required=True)

    def _is_log_due(self, run: h.Run) -> bool:
        """Decide by the main rank's clock. A collective."""
        is_late = run.engine.is_main and monotonic() - self._reported_at >= self.interval
        return bool(run.engine.vote([float(is_late)])[0])

    def _report(self, run: h.Run) -> None:
        assert self._unreported is not None
        metrics, self._unreported, self._is_due = self._unreported, None, False
        run.engine.barrier()  # detects a rank that hangs or has failed; Ray would wait for it forever
        self._send(run, metrics)

    def _send(self, run: h.Run, metrics: dict[str, float], folder: Path | None = None) -> None:
        assert self._session is not None
        with nullcontext() if folder is None else run.engine.writing():
            notice = self._session.report(metrics, folder)
        self._reported_at = monotonic()
        if notice is not None and self._notice is None and not run.control.should_stop:
            run.control.stop(notice.reason, by=notice.by)
            self._notice = notice

    def _record_exit(self, run: h.Run, session: Session) -> None:
        """Record on every rank the notice that stopped the run, if any. A collective."""
        gathered: list[tuple[Notice | None, bool]] = run.engine.gather_objects((self._notice, self._is_exiting))
        stop = run.control.stop_request
        for notice, is_exiting in gathered:
            if notice is not None and stop is not None and stop.by == notice.by:
                session.exit_notice = notice
                if is_exiting:
                    run.hooks.exit_with(EXIT_STATUS)
                return


def stage_report(run_name: str, path: Path, best: Path | None) -> tuple[Path, dict[str, float]]:
    """Return a folder with the files, which the caller removes, and the metrics that the checkpoint was saved with."""
    store = Store(path.parent, run_name)
    files = _files_of(store, path)
    if best is not None and best != path and best.exists():
        files |= _files_of(store, best)
    folder = _empty_folder(store, "report")
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        try:
            os.link(file, folder / name)
        except OSError:  # the file system has no hard links
            shutil.copyfile(file, folder / name)
    entry = read_manifest(path)
    return folder, {**entry.metrics, "epoch": entry.progress["epoch"], "step": entry.progress["steps"]}


def contains_all(metrics: Mapping[str, float], subset: Mapping[str, float]) -> bool:
    return all(
        name in metrics and (value == metrics[name] or (math.isnan(value) and math.isnan(metrics[name])))
        for name, value in subset.items()
    )


def _files_of(store: Store, path: Path) -> dict[Path, Path]:
    try:
        return {file.relative_to(path.parent): file for file in store.files_of(path)}
    except ValueError as error:
        raise ValueError(
            f"{error} It cannot be reported. Shards must be in a folder that all ranks share; without one, "
            f"FSDPEngine(state='full') gathers everything on the main rank."
        ) from error


def fetch_newest(session: Session, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
    """Copy the newest intact checkpoint of a run from Ray's storage, unless the run's folder has it or a newer one.

    Returns:
        The checkpoint to resume, and notes about it.
    """
    notes: list[str] = []
    newest: Entry | None = None
    for report in session.stored_reports():
        if not (report.is_own or resume == "auto"):
            continue
        entries, are_all = _read_manifests(store, report, notes)
        if not entries:
            continue
        local = _find_local(store, entries[-1], notes)
        candidates = [local] if local is not None else _fetch_intact(store, report, entries, notes)
        newest = max([*candidates, *([] if newest is None else [newest])], key=lambda entry: entry.order, default=None)
        if are_all and newest is not None and newest.order >= entries[-1].order:
            break
    if newest is not None:
        return newest.path, notes
    if session.is_restart and resume is None:
        notes.append(f"starts fresh: Ray's storage has no intact checkpoint of {store.run_name!r} from this call")
        logger.warning(notes[-1])
    return resume, notes


def _note_damaged(report: StoredFolder, error: Exception, notes: list[str]) -> None:
    notes.append(f"skipped: {report.name} in Ray's storage: {error}")
    logger.warning("resume %s", notes[-1])


def _read_manifests(store: Store, report: StoredFolder, notes: list[str]) -> tuple[list[Entry], bool]:
    """Return the run's checkpoints in a report, the newest last, and whether all manifests could be read."""
    manifests = report.manifests()
    damaged = [] if manifests else [ValueError("no manifest: its upload was interrupted")]
    entries = [manifest for manifest in manifests.values() if isinstance(manifest, Entry)]
    damaged += [manifest for manifest in manifests.values() if isinstance(manifest, ValueError)]
    for error in damaged:
        _note_damaged(report, error, notes)
    ours = [entry for entry in entries if entry.family == store.run_name]
    return sorted(ours, key=lambda entry: entry.order), not damaged


def _find_local(store: Store, entry: Entry, notes: list[str]) -> Entry | None:
    """Return the newest intact checkpoint in the run's folder if the folder has `entry`.

    Other trainings with the same name, whose checkpoints may be in the folder, are ignored.
    """
    successors = [candidate for candidate in store.entries()[0] if candidate.training == entry.training]
    if not any((candidate.sequence, candidate.sha256) == (entry.sequence, entry.sha256) for candidate in successors):
        return None
    for candidate in successors:
        if candidate.sequence < entry.sequence:
            return None
        if not _is_intact(store, candidate):
            notes.append(f"skipped: {candidate.path} is damaged")
            continue
        if candidate.sequence > entry.sequence:
            notes.append(f"resumes {candidate.path}, which is newer than the reports in Ray's storage")
        return candidate
    return None


def _fetch_intact(store: Store, report: StoredFolder, entries: Sequence[Entry], notes: list[str]) -> list[Entry]:
    intact = []
    copies = {copy.sha256: copy for copy in store.entries()[0]}
    folder = _empty_folder(store, "fetched")
    try:
        report.fetch(folder)
        for entry in entries:
            path, copy = folder / entry.path.name, copies.get(entry.sha256)
            try:
                store.verify(path)
            except (ValueError, FileNotFoundError) as error:
                _note_damaged(report, error, notes)
                continue
            if copy is None or not _is_intact(store, copy):
                copy = store.take_in(path)
                notes.append(f"fetched {copy.path} from {report.name} in Ray's storage")
            intact.append(copy)
    finally:
        shutil.rmtree(folder)
    return intact


def _is_intact(store: Store, entry: Entry) -> bool:
    try:
        store.verify(entry.path)
    except (ValueError, FileNotFoundError):
        return False
    return True


def _empty_folder(store: Store, name: str) -> Path:
    folder = store.scratch(name)
    if folder.exists():  # a process was killed
        shutil.rmtree(folder)
    folder.mkdir()
    return folder
