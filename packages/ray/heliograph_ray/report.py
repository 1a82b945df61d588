"""Report a run's metrics and checkpoints to Ray, so that a restarted run can resume from Ray's storage."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic

from heliograph import (
    BatchEnd,
    CheckpointLoaded,
    CheckpointSaved,
    EpochStart,
    Lane,
    Log,
    NotRecorded,
    Plugin,
    Run,
    RunClosed,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationStart,
    on,
)
from heliograph.spi import Store, check_number, on_main, read_manifest

from .session import Notice, Session, current_session
from .storage.fetch_checkpoint import Resume, fetch_newest
from .storage.report_folder import StagedReport, add_progress, contains_all, stage_report

logger = logging.getLogger("heliograph")
EXIT_STATUS = 143  # as of a process that ended on SIGTERM: 128 + 15


class RayReport(Plugin):
    """Report metrics and checkpoints to Ray.

    A restarted run resumes from Ray's storage.

    The launcher and the search for Ray add one to every trainer that has none. Outside of Ray it does nothing.

    A checkpoint is reported at `CheckpointSaved`, a validation at the next batch or epoch, a `Log` likewise, but not
    sooner than `interval` after the last report; what is left is reported when the run ends. A report has the latest
    value of all metrics, with `epoch` and `step`. The report of a checkpoint has the metrics that it was saved with,
    its files including shards, all of which the main rank must be able to read, and the best checkpoint. The loop waits
    until Ray has stored them; an error of the storage fails the run.

    A run that is restarted because a worker was lost, or the number of workers changed, resumes the newest intact
    checkpoint of its name that this call has reported, whatever `resume=` of its `Checkpoint` is; with `resume="auto"`,
    also one that an earlier call has reported. It is copied to the folder of the `Checkpoint`, unless it is there, or a
    newer one, which is then resumed instead. Several trainings in one function therefore need different names, and a
    storage that keeps the last checkpoint of each: `RayLauncher(keep=None)`.

    If a machine is to be taken away, the run saves and stops, and the process exits with status 143. If Ray ends the
    run, it stops.

    Args:
        interval: the least seconds between a report and the report of the next `Log`.

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

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Reset, and make Ray's storage the source of checkpoints."""
        if run.report.is_replay:
            raise NotRecorded("what Ray said to the run")
        self._session = current_session()
        self._reset()
        if self._session is not None:
            run.checkpoints.source = self

    def fetch(self, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
        """Copy the checkpoint to resume to the run's folder; return it, and notes about it."""
        assert self._session is not None
        self._has_checkpoints = True
        return fetch_newest(self._session, store, resume)

    @on(EpochStart, TrainEnd)
    def record_start(self, run: Run, event: EpochStart | TrainEnd) -> None:
        """Record, once, where the training starts."""
        if self._session is None or self._has_started:
            return
        self._has_started = True
        self._session.record_start(run.name, run.origin, run.checkpoints.resumed_from)
        if run.engine.is_main and not self._has_checkpoints:
            run.note("no plugin keeps checkpoints: if a worker is lost, the run starts fresh. Add a Checkpoint.")

    @on(EpochStart, BatchEnd)
    def check(self, run: Run, event: EpochStart | BatchEnd) -> None:
        """Update the progress, report what is due, and exit if the machine is to be taken away."""
        session = self._session
        if session is None:
            return
        session.update_progress(run.name, run.progress)
        if self._is_due:
            self._report(run)
        if isinstance(event, BatchEnd):  # EpochStart has no boundary of its own: a save there would make one
            self._request_exit(run, session)

    @on(CheckpointLoaded)
    def check_again(self, run: Run, event: CheckpointLoaded) -> None:
        """Repeat the requests if the run rolled back, which has dropped the request to save."""
        self._is_exiting = False
        if self._session is not None:
            self._request_exit(run, self._session)

    @on(ValidationStart, ValidationBatchEnd, optional=True)
    def cut_validation(self, run: Run, event: ValidationStart | ValidationBatchEnd) -> None:
        """Postpone a validation if the machine is to be taken away."""
        if self._session is not None and run.optimizer is not None and (notice := self._session.notice()) is not None:
            run.control.cut_validation(notice.reason, by=notice.by)

    @on(Log, ValidationEnd, lane=Lane.REPORT, optional=True)
    def collect(self, run: Run, event: Log | ValidationEnd) -> None:
        """Collect the metrics to report, after all handlers that add to them."""
        if self._session is None or run.optimizer is None:
            return
        self._unreported = add_progress(run.metrics | event.metrics, run.progress)
        self._is_due = self._is_due or isinstance(event, ValidationEnd) or self._is_log_due(run)

    @on(CheckpointSaved, lane=Lane.REPORT)
    def report_checkpoint(self, run: Run, event: CheckpointSaved) -> None:
        """Report a checkpoint, with the metrics that it was saved with."""
        if self._session is None:
            return
        if run.engine.world_size > 1 and run.report.has_left_group:
            run.note(f"{event.path} is not in Ray's storage: the ranks had left their group before it was reported")
            return
        staged, has_all = on_main(run.engine, partial(self._stage, run, event.path))
        if staged is None:  # only weights, from which no trial continues
            return
        try:
            self._send(run, staged.metrics, staged)
        finally:
            if run.engine.is_main:
                shutil.rmtree(staged.folder)
        if has_all:
            self._unreported, self._is_due = None, False

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Report what is left, and record the notice if the run ended on one."""
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

    def _stage(self, run: Run, path: Path) -> tuple[StagedReport | None, bool]:
        """Stage the report of a full checkpoint; return also whether its metrics include all unreported ones."""
        if read_manifest(path).weights_only:
            return None, False
        best = run.checkpoints.best
        if best is not None and read_manifest(best).weights_only:
            best = None
        staged = stage_report(run.name, path, best)
        return staged, self._unreported is not None and contains_all(staged.metrics, self._unreported)

    def _request_exit(self, run: Run, session: Session) -> None:
        """Request a save and a stop if the machine is to be taken away."""
        if self._is_exiting or (notice := session.notice()) is None:
            return
        self._is_exiting, self._notice = True, notice
        logger.warning("%s: run %r saves and stops", notice.reason, run.name)
        run.control.request_save(notice.reason, by=notice.by, required=True)
        run.control.stop(notice.reason, by=notice.by, required=True)

    def _is_log_due(self, run: Run) -> bool:
        """Return whether a log is to be reported, by the main rank's clock. A collective."""
        is_late = run.engine.is_main and monotonic() - self._reported_at >= self.interval
        return bool(run.engine.vote([float(is_late)])[0])

    def _report(self, run: Run) -> None:
        assert self._unreported is not None
        metrics, self._unreported, self._is_due = self._unreported, None, False
        run.engine.barrier()  # here the engine finds a rank that hangs or has failed: Ray would wait for it forever
        self._send(run, metrics)

    def _send(self, run: Run, metrics: dict[str, float], staged: StagedReport | None = None) -> None:
        assert self._session is not None
        folder = staged.folder if staged is not None and run.engine.is_main else None
        with nullcontext() if folder is None else run.engine.writing():
            notice = self._session.report(metrics, folder)
        self._reported_at = monotonic()
        if notice is not None and self._notice is None and not run.control.should_stop:
            run.control.stop(notice.reason, by=notice.by)
            self._notice = notice

    def _record_exit(self, run: Run, session: Session) -> None:
        """Record, on every rank, the notice on which the run stopped, if there is one. A collective."""
        gathered: list[tuple[Notice | None, bool]] = run.engine.gather_objects((self._notice, self._is_exiting))
        stop = run.control.stop_request
        for notice, is_exiting in gathered:
            if notice is not None and stop is not None and stop.by == notice.by:
                session.record_exit(notice)
                if is_exiting:
                    run.hooks.exit_with(EXIT_STATUS)
                return
