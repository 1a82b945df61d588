"""Tell Ray of a run: its metrics and its checkpoints, from which a run that is begun anew goes on."""

from __future__ import annotations

import logging
import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, cast

from ...core.checkpoint.storage import Store
from ...core.distributed.ranks.outcomes import on_main
from ...core.errors import NotRecorded
from ...events import (
    BatchEnd,
    CheckpointLoaded,
    CheckpointSaved,
    EpochStart,
    Lane,
    Log,
    Run,
    RunClosed,
    TrainEnd,
    TrainStart,
    ValidationBatchEnd,
    ValidationEnd,
    ValidationStart,
)
from ...events.checks import check_number
from ...plugins import Plugin, on
from .session import Notice, Session, current_session
from .storage.fetch_checkpoint import Resume, fetch
from .storage.report_folder import Staged, are_among, facts_of, stage

if TYPE_CHECKING:
    from ...core.engines.contract import LoopEngine

logger = logging.getLogger("heliograph")
LEAVES = 143  # the exit status of a process that was told to end: 128 + SIGTERM


class RayReport(Plugin):
    """Report metrics and checkpoints to Ray, and let a run that is begun anew go on from Ray's storage.

    The launcher and the search for Ray add one to every trainer that has none. Outside of Ray it does nothing.

    A report is made at every `CheckpointSaved`, of a validation at the next batch or epoch, of a `Log` likewise, but
    not sooner than `interval` after the last report, and what is left when the run ends is reported then. Each has the
    latest value of all metrics, with `epoch` and `step`. That of a checkpoint has the metrics that it was saved with,
    and its files, shards included: all of them must lie where the main rank sees them. The best one travels along.
    The loop waits until Ray has it all; an error of the storage fails the run.

    A run that is begun anew since a worker was lost, or their number changed, goes on from the newest whole checkpoint
    of its name that this call has reported, whatever its `Checkpoint` is told; where that says `resume="auto"`, from
    what an earlier call has reported, too. It is copied into the folder of the `Checkpoint`, unless it lies there; what
    was saved there after it is newer, and taken instead. So several trainings in one function need names of their own,
    and a storage that keeps the last checkpoint of each: `RayLauncher(keep=None)`.

    Where a machine is to be taken away, the run saves, stops and lets the process exit with status 143, and where Ray
    asks for its end, it stops.

    Args:
        interval: the least seconds between a report and the next one of a `Log`.

    Raises:
        ValueError: `interval` is no number, negative or not finite; at a save, some of its files are not there.
        OSError: the storage did not take a checkpoint, or cannot be read.
    """

    patience = 30.0  # seconds until workers that Ray has ended are gone, and hold no folder any more
    affects_training = False
    exclusive = ("ray_report",)  # no asks: that it may ask for a save and a stop is nothing to rely on

    def __init__(self, interval: float = 10.0) -> None:
        self.interval = float(check_number("interval", interval, of="seconds", at_least=0))
        self._session: Session | None = None
        self._news: dict[str, float] | None = None  # measured, and not yet reported
        self._reported_at = -math.inf
        self._is_due = self._is_kept = self._is_under_way = self._leaves = False
        self._notice: Notice | None = None

    @on(TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Forget the former run, and let what Ray has stored be found."""
        if run.is_replay:
            raise NotRecorded("what Ray said to the run")
        self._session = current_session()
        self._forget()
        if self._session is not None:
            run.checkpoint_source = self

    def fetch(self, store: Store, resume: Resume) -> tuple[Resume, list[str]]:
        """Put what the run is to go on from into the folder of its checkpoints; return it, and what there is to say."""
        assert self._session is not None
        self._is_kept = True
        return fetch(self._session, store, resume)

    @on(EpochStart, TrainEnd)
    def tell_beginning(self, run: Run, event: EpochStart | TrainEnd) -> None:
        """Tell where the training begins."""
        if self._session is None or self._is_under_way:
            return
        self._is_under_way = True
        self._session.resumed(run.name, run.origin, run.resumed_from)
        if run.engine.is_main and not self._is_kept:
            run.note("no plugin keeps checkpoints: where a worker is lost, the run begins afresh. Add a Checkpoint.")

    @on(EpochStart, BatchEnd)
    def look(self, run: Run, event: EpochStart | BatchEnd) -> None:
        """Tell where the run is, and leave where the machine is to be taken away."""
        session = self._session
        if session is None:
            return
        session.pulse(run.name, run.progress)
        if self._is_due:
            self._report(run)
        if isinstance(event, BatchEnd):  # EpochStart has no boundary of its own: a save there would make one
            self._ask_to_leave(run, session)

    @on(CheckpointLoaded)
    def look_again(self, run: Run, event: CheckpointLoaded) -> None:
        """Ask anew where the run went back: that dropped the request to save."""
        self._leaves = False
        if self._session is not None:
            self._ask_to_leave(run, self._session)

    @on(ValidationStart, ValidationBatchEnd)
    def look_in_validation(self, run: Run, event: ValidationStart | ValidationBatchEnd) -> None:
        """Put a validation off where the machine is to be taken away."""
        if self._session is not None and run.optimizer is not None and (notice := self._session.notice()) is not None:
            run.control.cut_validation(notice.reason, by=notice.by)

    @on(Log, ValidationEnd, lane=Lane.REPORT)
    def take_metrics(self, run: Run, event: Log | ValidationEnd) -> None:
        """Take what is to be reported, behind all who add to it."""
        if self._session is None or run.optimizer is None:
            return
        self._news = facts_of(run.progress, run.metrics | event.metrics)
        self._is_due = self._is_due or isinstance(event, ValidationEnd) or self._may_report(run)

    @on(CheckpointSaved, lane=Lane.REPORT)
    def report_checkpoint(self, run: Run, event: CheckpointSaved) -> None:
        """Report a checkpoint, with the metrics that it was saved with."""
        if self._session is None:
            return
        if run.engine.world_size > 1 and run.has_left_group:
            run.note(f"{event.path} did not get into Ray's storage: the ranks had parted before it was told of")
            return
        staged, has_news = on_main(run.engine, partial(self._stage, run, event.path))
        try:
            self._send(run, staged.facts, staged)
        finally:
            if run.engine.is_main:
                shutil.rmtree(staged.folder)
        if has_news:
            self._news, self._is_due = None, False

    @on(RunClosed, lane=Lane.REPORT)
    def end(self, run: Run, event: RunClosed) -> None:
        """Report what is left, and say whether the run ended since it was asked to leave."""
        session = self._session
        if session is None or run.optimizer is None:
            return
        if event.status in ("completed", "stopped") and not run.has_left_group:
            if self._news is not None:
                self._report(run)
            if event.status == "stopped":
                self._leave(run, session)
        self._session = None

    def _forget(self) -> None:
        self._news, self._reported_at, self._notice = None, -math.inf, None
        self._is_due = self._is_kept = self._is_under_way = self._leaves = False

    def _stage(self, run: Run, path: Path) -> tuple[Staged, bool]:
        """Gather what is to be reported of a checkpoint; return also whether nothing else is left to report then."""
        staged = stage(run.name, path, run.best_checkpoint)
        return staged, self._news is not None and are_among(self._news, staged.facts)

    def _ask_to_leave(self, run: Run, session: Session) -> None:
        """Ask for a save and a stop where the machine is to be taken away."""
        if self._leaves or (notice := session.notice()) is None:
            return
        self._leaves, self._notice = True, notice
        logger.warning("%s: run %r saves and stops", notice.reason, run.name)
        run.control.request_save(notice.reason, by=notice.by)
        run.control.stop(notice.reason, by=notice.by)

    def _may_report(self, run: Run) -> bool:
        """Return whether a report is due by the main rank's clock. A collective."""
        is_late = run.engine.is_main and monotonic() - self._reported_at >= self.interval
        return bool(cast("LoopEngine", run.engine).vote([float(is_late)])[0])

    def _report(self, run: Run) -> None:
        assert self._news is not None
        news, self._news, self._is_due = self._news, None, False
        run.engine.barrier()  # who hangs or has failed is found by the engine: Ray would wait for it for ever
        self._send(run, news)

    def _send(self, run: Run, facts: dict[str, float], staged: Staged | None = None) -> None:
        assert self._session is not None
        folder = staged.folder if staged is not None and run.engine.is_main else None
        watch = None if folder is None else cast("LoopEngine", run.engine).watch
        with nullcontext() if watch is None else watch.writing():
            notice = self._session.report(facts, folder)
        self._reported_at = monotonic()
        if notice is not None and self._notice is None and not run.control.should_stop:
            run.control.stop(notice.reason, by=notice.by)
            self._notice = notice

    def _leave(self, run: Run, session: Session) -> None:
        """Let every rank know upon whose notice the run stopped, if upon one. A collective."""
        heard: list[tuple[Notice | None, bool]] = run.engine.gather_objects((self._notice, self._leaves))
        stop = run.control.stop_request
        for notice, leaves in heard:
            if notice is not None and stop is not None and stop.by == notice.by:
                session.leave(notice)
                if leaves:
                    run.exit_with(LEAVES)
                return
