"""Save and stop when the cluster says so."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from signal import Signals

from ..core.host import current_host
from ..core.system.errors import NotRecorded
from ..core.system.signals import Deadline, SignalHook
from ..events import Lane, Run
from ..events import catalogue as ev
from ..events.checks import check_number, check_whole_number
from ..plugins import Plugin, on

DEFAULT = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one


logger = logging.getLogger("heliograph")


class Preemption(Plugin):
    """Save and stop when the cluster sends a signal.

    A training does so at the next step boundary, a validation, test or prediction at the next batch. A validation that
    is cut short is postponed: the resumed run begins with it. The result says `stopped`, by whom and by which signal;
    when the run is closed, `fit`, `validate`, `test` and `predict` raise SystemExit, so that the exit status is right
    (but see `fit(on_interrupt=...)`). Where the training was over when the signal came, the result says `completed`,
    and the exit status still shows the signal. A second signal while the run stops changes nothing. A veto of the stop
    holds this one too, but not the save.

    The handlers are installed when a run begins and given back when it is closed; a handler in Python that was there
    before is called as well. Put the plugin last: plugins are closed in their order, and a signal during the closing
    of one after it would end the process at once. Needs a `Checkpoint`, or nothing is saved. On Ray, where the
    training is not in the main thread, it listens to nothing: `RayReport` does the same upon Ray's own notice.

    Args:
        signals: what to listen to; by default SIGTERM, and SIGUSR1 where there is one.
        deadline: seconds from the signal until the process must be leaving. If it is not, TimeoutError is raised
            wherever the run is, even where it is blocked in a call that signals interrupt, as they do a sleep or a
            read; not in one that does not return to Python, such as a kernel or a collective that hangs. None waits as
            long as it takes.
        requeue: the exit status with which your cluster runs the job again; by default 128 + the signal's number.

    Raises:
        ValueError: an argument is out of its range; at a run's start, the run is not in the main thread, or a handler
            is there that could not be given back.
        TimeoutError: the deadline is over.
    """

    affects_training = False
    asks = ("stop", "save")
    exclusive = ("preemption",)

    def __init__(
        self, signals: Sequence[int] = DEFAULT, *, deadline: float | None = None, requeue: int | None = None
    ) -> None:
        if deadline is not None:
            deadline = check_number("deadline", deadline, of="seconds", more_than=0, or_else="None")
        if requeue is not None:
            requeue = check_whole_number("requeue, an exit status,", requeue, at_least=0, at_most=255, or_else="None")
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
        """Install the handlers, and forget the former run."""
        self._begin(run)
        if not run.plugins.writes_saves():
            run.warn(f"Plugin {self.name!r} would stop the run and lose it: add Checkpoint('runs/x') to the plugins.")

    @on(ev.BatchEnd, ev.EpochEnd, ev.ValidationCut)
    def look(self, run: Run, event: ev.BatchEnd | ev.EpochEnd | ev.ValidationCut) -> None:
        """Ask for a save and a stop where a signal came; not at EpochStart, which has no boundary of its own.

        After a cut validation at once, so that the save is not taken for one that was to carry its metrics. None where
        the state is saved already, as at the end of a training: the resumed run validates then.
        """
        if self._received is not None and not self._asked:
            is_saved = isinstance(event, ev.ValidationCut) and self._saved_at == _place(run)
            self._ask(run, self._received, saves=not is_saved)

    @on(ev.SavePoint, lane=Lane.MEASURE, optional=True)
    def note_save(self, run: Run, event: ev.SavePoint) -> None:
        """Note what is saved, if a plugin is enabled that writes it."""
        if run.plugins.writes_saves():
            self._saved_at = _place(run)

    @on(ev.CheckpointLoaded)
    def look_again(self, run: Run, event: ev.CheckpointLoaded) -> None:
        """Note that what is resumed is saved; request again where the run rolled back: that dropped the request."""
        is_resume = run.origin is run.checkpoints.resumed_at  # what a run goes back to does not hold yet why
        self._saved_at = _place(run) if is_resume and event.path is not None else None
        if self._received is not None:
            self._ask(run, self._received, saves=True)

    @on(ev.ValidationStart, ev.TestStart, ev.PredictStart, lane=Lane.TRANSFORM, optional=True)
    def begin_evaluation(self, run: Run, event: ev.ValidationStart | ev.TestStart | ev.PredictStart) -> None:
        """Cut a validation short that begins although a signal came; begin a run that consists of nothing else."""
        if self._run is not run:
            self._begin(run)
        self._cut(run)

    @on(ev.ValidationBatchEnd, ev.TestBatchEnd, ev.PredictBatchEnd, optional=True)
    def look_in_evaluation(self, run: Run, event: ev.ValidationBatchEnd | ev.TestBatchEnd | ev.PredictBatchEnd) -> None:
        """Cut it short where a signal came."""
        self._cut(run)

    @on(ev.RunFailed, lane=Lane.TRANSFORM)
    def leave_in_peace(self, run: Run, event: ev.RunFailed) -> None:
        """Let the deadline be, the process is leaving; upon a Ctrl-C, a second one may leave without closing this."""
        self._stop_clock()
        if isinstance(event.error, KeyboardInterrupt):
            self._hook.restore()

    def close(self) -> None:
        self._stop_clock()
        self._hook.restore()
        if self._run is not None and self._received is not None:
            self._run.hooks.exit_with(128 + self._received if self.requeue is None else self.requeue)
        self._run, self._received, self._asked, self._saved_at = None, None, False, None

    def _begin(self, run: Run) -> None:
        if run.report.is_replay:
            raise NotRecorded("the signals that the process got")
        self.close()
        self._run = run
        if current_host() is not None and threading.current_thread() is not threading.main_thread():
            run.note(
                "preemption receives no signals in a thread of Ray: ray_report has Ray's notices about the machine"
            )
            return
        self._hook.install()
        if self.deadline is not None:
            self._clock = Deadline(self.deadline)

    def _handle_signal(self, signum: int) -> None:
        """Handle the signal."""
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
            clock, self._clock = self._clock, None  # first: what it still sends must not raise any more
            clock.close()

    def _overdue(self) -> str:
        assert self._run is not None  # the clock is stopped before it is let go
        assert self._received is not None
        phase, place = self._run.phase, self._run.progress
        return (
            f"The run did not end within {self.deadline} s of {self._received.name}: it is in {phase}, epoch "
            f"{place.epoch}, batch {place.batch}, step {place.steps}. Give it more time, or find out what takes it."
        )


def _place(run: Run) -> tuple[int, int]:
    return run.progress.batches, run.progress.epoch
