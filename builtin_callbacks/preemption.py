"""Saving and stopping when the cluster preempts the job."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from signal import Signals
from typing import Literal

from ..core.host import current_host
from ..core.system.errors import NotRecorded
from ..core.system.signals import Deadline, SignalHook
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_number, check_whole_number
from ..plugins import Plugin, on

DEFAULT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one
SLURM, JOB = "slurm", "SLURM_JOB_ID"
REQUEUE_SECONDS = 30.0  # for an answer of scontrol
logger = logging.getLogger("heliograph")


class Preemption(Plugin):
    """Save and stop when the cluster sends a signal.

    A training stops at the next step boundary; a validation, test or prediction at the next batch. A validation that is
    cut short is postponed to the beginning of the resumed run. The result has the status `stopped` and names the
    signal. When the run is closed, `fit`, `validate`, `test` and `predict` raise SystemExit with the exit status (but
    see `fit(on_interrupt=...)`). If the training was already over, the status is `completed`, and the exit status still
    shows the signal. A second signal has no effect while the run stops. A veto postpones this stop too, but not the
    save.

    The signal handlers are installed when a run begins and restored when it is closed. A previous Python handler is
    also called. Put this plugin last: plugins are closed in order, and a signal while a later plugin is closed would
    end the process immediately. A `Checkpoint` is required to save anything. On Ray, where the training does not run in
    the main thread, this plugin has no effect: `RayReport` handles Ray's own notice instead.

    Args:
        signals: the signals to handle; by default SIGTERM, and SIGUSR1 if it exists.
        deadline: seconds from the signal until the run must end. Afterwards TimeoutError is raised in the main thread,
            also in calls that signals interrupt, such as a sleep or a read, but not in calls that do not return to
            Python, such as a hanging collective. None waits without a limit.
        requeue: the exit status with which your cluster restarts the job; by default 128 + the number of the signal.
            `slurm` calls `scontrol requeue` in the main process when this plugin is closed.

    Raises:
        ValueError: an argument is out of range. At the start of a run also if it is not in the main thread, if an
            existing signal handler could not be restored, or if `requeue="slurm"` is not in a job of Slurm.
        TimeoutError: the deadline has passed.
    """

    affects_training = False
    asks = ("stop", "save")
    exclusive = ("preemption",)

    def __init__(
        self,
        signals: Sequence[int] = DEFAULT,
        *,
        deadline: float | None = None,
        requeue: int | Literal["slurm"] | None = None,
    ) -> None:
        if deadline is not None:
            deadline = check_number("deadline", deadline, of="seconds", more_than=0, or_else="None")
        if requeue is not None and requeue != SLURM:
            requeue = check_whole_number(
                "requeue, an exit status,", requeue, at_least=0, at_most=255, or_else="'slurm'"
            )
        self.deadline, self.requeue = deadline, requeue
        self._hook = SignalHook(signals, self._handle_signal)
        self._clock: Deadline | None = None
        self._run: Run | None = None
        self._received: Signals | None = None
        self._asked = False
        self._saved_at: tuple[int, int] | None = None

    def describe(self, run: Run) -> str:
        return f"saves and stops at {self._hook.names}"

    @on(ev.TrainStart, lane=Lane.TRANSFORM)
    def begin(self, run: Run, event: ev.TrainStart) -> None:
        """Install the signal handlers."""
        self._begin(run)
        if not run.plugins.writes_saves():
            run.warn(f"Plugin {self.name!r} would stop the run without a save: add Checkpoint('runs/x').")

    @on(ev.BatchEnd, ev.EpochEnd, ev.ValidationCut)
    def look(self, run: Run, event: ev.BatchEnd | ev.EpochEnd | ev.ValidationCut) -> None:
        """Request a save and a stop after a signal.

        Not at `EpochStart`, which has no boundary. After a cut validation the request is made immediately, so that its
        save is not postponed; if the state was already saved, no save is requested, and the resumed run validates
        first.
        """
        if self._received is not None and not self._asked:
            is_saved = isinstance(event, ev.ValidationCut) and self._saved_at == _place(run)
            self._ask(run, self._received, saves=not is_saved)

    @on(ev.SavePoint, lane=Lane.MEASURE, optional=True)
    def note_save(self, run: Run, event: ev.SavePoint) -> None:
        """Record that the state was saved."""
        if run.plugins.writes_saves():
            self._saved_at = _place(run)

    @on(ev.CheckpointLoaded)
    def look_again(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Repeat the requests after a roll-back, which has dropped them."""
        is_resume = run.origin is run.checkpoints.resumed_at  # False in a roll-back, whose state lacks the reason
        self._saved_at = _place(run) if is_resume and event.path is not None else None
        if self._received is not None:
            self._ask(run, self._received, saves=True)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Cut the validation short if a signal came; install the handlers in a test."""
        if self._run is not run:
            self._begin(run)
        self._cut(run)

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd, optional=True)
    def look_in_evaluation(self, run: Run, event: ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd) -> None:
        """Cut the evaluation short if a signal came."""
        self._cut(run)

    @on(ev.RunFailed, lane=Lane.TRANSFORM)
    def leave_in_peace(self, run: Run, event: ev.RunFailed) -> None:
        """Stop the deadline, because the process already ends.

        After a Ctrl-C the signal handlers are restored, because a second one may exit without closing this plugin.
        """
        self._stop_clock()
        if isinstance(event.error, KeyboardInterrupt):
            self._hook.restore()

    def close(self) -> None:
        self._stop_clock()
        self._hook.restore()
        if self._run is not None and self._received is not None:
            status = self.requeue if isinstance(self.requeue, int) else 128 + self._received
            self._run.hooks.exit_with(status)
            if self.requeue == SLURM and self._run.engine.is_main:
                _requeue_job(self._run)
        self._run, self._received, self._asked, self._saved_at = None, None, False, None

    def _begin(self, run: Run) -> None:
        if run.report.is_replay:
            raise NotRecorded("the signals that the process got")
        self.close()
        self._run = run
        job = os.environ.get(JOB)
        if self.requeue == SLURM and (not job or shutil.which("scontrol") is None):
            missing = f"the variable {JOB}" if not job else "the command scontrol"
            raise ValueError(f"Preemption(requeue='slurm') needs {missing}: submit the training with sbatch.")
        if job:
            run.note(f"Slurm job {job}, restart {os.environ.get('SLURM_RESTART_COUNT', '0')}")
        if current_host() is not None and threading.current_thread() is not threading.main_thread():
            run.note("preemption receives no signals in a thread of Ray: use ray_report, which receives Ray's notices")
            return
        self._hook.install()
        if self.deadline is not None:
            self._clock = Deadline(self.deadline)

    def _handle_signal(self, signum: int) -> None:
        if self._clock is not None and self._clock.is_over:
            raise TimeoutError(self._overdue())
        if self._received is None:
            self._received = Signals(signum)
            if self._clock is not None:
                self._clock.start(signum)

    def _cut(self, run: Run) -> None:
        if self._received is not None and run.control.is_evaluating:  # else the loop is another framework's
            run.control.cut_validation(f"{self._received.name} was received")

    def _ask(self, run: Run, received: Signals, *, saves: bool) -> None:
        self._asked = True
        acts = "saves and stops" if run.plugins.writes_saves() else "stops, and no plugin saves it"
        logger.warning("%s was received: run %r %s", received.name, run.name, acts if saves else "is saved, and stops")
        run.control.stop(f"{received.name} was received", required=True)
        if saves and run.optimizer is not None:
            run.control.request_save(f"{received.name} was received", required=True)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            clock, self._clock = self._clock, None  # first, so that its last signals do not raise
            clock.close()

    def _overdue(self) -> str:
        assert self._run is not None  # until the clock is stopped
        assert self._received is not None
        phase, place = self._run.phase, self._run.progress
        return (
            f"The run did not end within {self.deadline} s of {self._received.name}: it is in {phase}, epoch "
            f"{place.epoch}, batch {place.batch}, step {place.steps}. Increase deadline=, or shorten this step."
        )


def _place(run: Run) -> tuple[int, int]:
    return run.progress.batches, run.progress.epoch


def _requeue_job(run: Run) -> None:
    job = os.environ[JOB]
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REQUEUE_SECONDS)  # noqa: S603
    except subprocess.TimeoutExpired:
        problem = f"has not answered in {REQUEUE_SECONDS:g} s; the job may not start again"
    else:
        if not done.returncode:
            logger.warning("Slurm job %s was requeued", job)
            return
        problem = f"failed with status {done.returncode}: {(done.stderr or done.stdout).strip()}"
    run.warn(f"scontrol requeue {job} {problem}")
    logger.error("scontrol requeue %s %s", job, problem)  # with on_interrupt="raise" no result shows the warning
