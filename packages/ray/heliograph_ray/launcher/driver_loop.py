"""The loop of the calling process: it receives the workers' messages and sends them commands."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from heliograph import RankFailed
from heliograph.core.system.signals import SignalHook
from heliograph.spi import error_chain

from ..session import LAUNCHER, Notice
from .attempts import GroupTracker, WorkerGroup
from .capacity import Sizes, StartupMonitor
from .mailbox import Commands, DriverChannel, Envelope, Exited, Failed, QueueItem, Reported, Value

INTERVAL = 0.2  # seconds until a signal, or the end of Ray's run, is noticed
END_TIMEOUT = 30.0  # seconds for Ray's run to end after its workers have
CALLER_ENDS = "the process that called RayLauncher.run is ending"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
OnMessage = Callable[[int, Any], object]
OnReport = Callable[[Reported], tuple[str, str] | None]


class Fit(threading.Thread):
    """Runs Ray's trainer in a thread: in the main thread, Ray would replace the handler of Ctrl-C and not restore it.

    Args:
        run: the `fit` of Ray's trainer.

    Attributes:
        is_reused: whether the workers have served an earlier call.
        error: the exception of Ray, if any.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(name="heliograph-ray", daemon=True)
        self.is_reused = False
        self.error: BaseException | None = None
        self._function = run
        self.start()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  # read by the driver loop
            self.error = error


class DriverLoop:
    """Processes the workers' messages and this process's signals while Ray runs the workers.

    Args:
        channel: connects this process with the workers.
        tracker: records the workers' messages.
        grace: seconds that the workers have to end after a request.
        on_message: called with (rank, object) for each object that is put into a rank's queue.
        on_report: called with each report; returns (name, reason) to stop the runs, or None.
        keeps: whether workers wait for another call after they have returned.

    Attributes:
        error: the exception of `on_message`, `on_report` or a check of the cluster.
        signals: the signals that were received.
    """

    def __init__(
        self,
        channel: DriverChannel,
        tracker: GroupTracker,
        grace: float,
        on_message: OnMessage,
        on_report: OnReport | None,
        *,
        keeps: bool = False,
    ) -> None:
        self._channel, self._tracker, self._grace = channel, tracker, grace
        self._on_message, self._on_report, self._keeps = on_message, on_report, keeps
        self._commands = Commands()
        self._deadline: float | None = None
        self._dismissed = ""  # the id of the last group whose waiting workers were ended
        self.error: Exception | None = None
        self.signals: set[int] = set()

    @property
    def is_stopping(self) -> bool:
        return self._commands.stop is not None or self._commands.exit is not None

    @property
    def is_ending(self) -> bool:
        return bool(self.signals) or self.error is not None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        handled = [signum for signum in SIGNALS if signal.getsignal(signum) not in (signal.SIG_IGN, None)]
        if not handled or threading.current_thread() is not threading.main_thread():
            yield
            return
        hook = SignalHook(handled, self._handle_signal)
        hook.install()
        try:
            yield
        finally:
            hook.restore()

    def run_fit(self, fit: Fit, sizes: Sizes) -> BaseException | None:
        monitor, is_served = StartupMonitor(sizes), False
        while fit.is_alive() and not is_served and not self._is_late():
            self._process(self._channel.receive(INTERVAL))
            is_served = self._is_served()
            if self._tracker.group is None:
                self._call(monitor.check)
        if is_served:
            return None
        if not fit.is_alive():
            self._process(self._channel.receive(0))
            return fit.error
        self._channel.close()  # ends the workers, and with them Ray's run
        if self._tracker.group is not None:  # without any, Ray waits for resources until this process exits
            fit.join(END_TIMEOUT)
        return fit.error

    def pause(self, seconds: float) -> None:
        limit = monotonic() + seconds
        while not self.is_ending and (remaining := limit - monotonic()) > 0:
            threading.Event().wait(min(INTERVAL, remaining))

    def _is_late(self) -> bool:
        if self.is_ending and self._deadline is None:
            self._deadline = monotonic() + self._grace
            self._command(replace(self._commands, exit=Notice(LAUNCHER, CALLER_ENDS)))
        return self._deadline is not None and (self._tracker.group is None or monotonic() >= self._deadline)

    def _is_served(self) -> bool:
        group = self._tracker.group
        if not self._keeps or group is None or _running(group):
            return False
        if group.is_complete and not (group.exit_notices or self.is_ending or self.is_stopping):
            return True
        if self._dismissed != self._tracker.group_id:
            self._dismissed = self._tracker.group_id
            self._channel.dismiss()
        return False

    def _handle_signal(self, signum: int) -> None:
        if signum == signal.SIGINT and signum in self.signals:
            raise KeyboardInterrupt
        self.signals.add(signum)

    def _process(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            message = self._tracker.record(envelope)
            if isinstance(message, QueueItem):
                self._call(partial(self._deliver, envelope.rank, message.payload))
            elif isinstance(message, Reported) and self._on_report is not None:
                if stop := self._call(partial(self._on_report, message)):
                    self._command(replace(self._commands, stop=Notice(*stop)))
            elif isinstance(message, Value | Failed | Exited):
                self._release()

    def _deliver(self, rank: int, payload: bytes) -> None:
        try:
            self._on_message(rank, pickle.loads(payload))  # noqa: S301  # from our own worker
        except Exception as error:
            error.add_note(f"heliograph: raised while processing a message of rank {rank}")
            raise

    def _call(self, function: Callable[[], Any]) -> Any:
        if self.error is None:
            try:
                return function()
            except Exception as error:  # noqa: BLE001  # raised when the workers have ended
                self.error = error
        return None

    def _release(self) -> None:
        group, group_id = self._tracker.group, self._tracker.group_id
        if group is not None and group.failed and not _running(group) and group_id not in self._commands.released:
            self._command(replace(self._commands, released=self._commands.released | {group_id}))

    def _command(self, commands: Commands) -> None:
        self._commands = commands
        self._channel.command(commands)


def _running(group: WorkerGroup) -> set[int]:
    errors = [failure.error.rebuild() for failure in group.failed.values() if failure.is_secondary]
    seen = [cause for error in errors for cause in error_chain(error) if isinstance(cause, RankFailed)]
    missing = {failure.rank for failure in seen if not failure.was_reported}
    ended = group.values.keys() | group.failed.keys() | group.exit_notices.keys()
    return set(range(group.world_size)) - ended - missing
