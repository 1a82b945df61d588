"""What the calling process does while Ray runs the workers: process their messages and send them commands."""

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
from .capacity import StartupMonitor
from .fit import Fit
from .mailbox import Commands, DriverChannel, Envelope, Exited, Failed, QueueItem, Reported, Value
from .sizes import Sizes

INTERVAL = 0.2  # seconds until a signal, or the end of Ray's run, is noticed
END_TIMEOUT = 30.0  # seconds for Ray's run to end after its workers have
CALLER_ENDS = "the process that called RayLauncher.run is to end"
SIGNALS = (signal.SIGINT, signal.SIGTERM)

OnMessage = Callable[[int, Any], object]
OnReport = Callable[[Reported], tuple[str, str] | None]


class DriverLoop:
    """Processes the workers' messages and this process's signals while Ray runs the workers.

    Args:
        channel: connects this process with the workers.
        tracker: records the workers' messages.
        grace: seconds that the workers have to end after they were asked to.
        on_message: called with (rank, object) for each object that is put into a rank's queue.
        on_report: called with each report; returns (name, reason) to stop the runs, or None.
        keeps: whether workers that have returned wait for another call.

    Attributes:
        error: what `on_message`, `on_report` or a look at the cluster raised.
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
        """Whether the workers were asked to end, so that their end is not a failure."""
        return self._commands.stop is not None or self._commands.exit is not None

    @property
    def is_ending(self) -> bool:
        """Whether this process waits only for the workers to end: after a signal, or an error of its own."""
        return bool(self.signals) or self.error is not None

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM within the context, except for those that this process ignores."""
        handled = [each for each in SIGNALS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
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
        """Process messages until Ray's run ends, or its workers wait for another call; return what Ray raised."""
        monitor, is_served = StartupMonitor(sizes), False
        while fit.is_alive and not is_served and not self._is_late():
            self._process(self._channel.receive(INTERVAL))
            is_served = self._is_served()
            if self._tracker.group is None:
                self._call(monitor.check)
        if is_served:
            return None
        if not fit.is_alive:
            self._process(self._channel.receive(0))
            return fit.error
        self._channel.close()  # ends the workers, and with them Ray's run
        if self._tracker.group is not None:  # without any, Ray waits for resources until this process exits
            fit.join(END_TIMEOUT)
        return fit.error

    def pause(self, seconds: float) -> None:
        """Wait so many seconds, or until a signal."""
        limit = monotonic() + seconds
        while not self.is_ending and (remaining := limit - monotonic()) > 0:
            threading.Event().wait(min(INTERVAL, remaining))

    def _is_late(self) -> bool:
        """Return whether the workers were asked to end and have not ended in time, or there are none."""
        if self.is_ending and self._deadline is None:
            self._deadline = monotonic() + self._grace
            self._command(replace(self._commands, exit=Notice(LAUNCHER, CALLER_ENDS)))
        return self._deadline is not None and (self._tracker.group is None or monotonic() >= self._deadline)

    def _is_served(self) -> bool:
        """Return whether all workers have returned and wait for another call; if they must not get one, end them."""
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
            error.add_note(f"heliograph: while a message of rank {rank} was processed")
            raise

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call a function, unless one has raised before; keep what it raises, to raise it after the workers' end."""
        if self.error is None:
            try:
                return function()
            except Exception as error:  # noqa: BLE001  # raised when the workers have ended
                self.error = error
        return None

    def _release(self) -> None:
        """Release failed workers when no other worker can still send how it ended."""
        group, group_id = self._tracker.group, self._tracker.group_id
        if group is not None and group.failed and not _running(group) and group_id not in self._commands.released:
            self._command(replace(self._commands, released=self._commands.released | {group_id}))

    def _command(self, commands: Commands) -> None:
        self._commands = commands
        self._channel.command(commands)


def _running(group: WorkerGroup) -> set[int]:
    """Return the ranks that have not ended, except for those that other ranks report as dead or hung."""
    errors = [each.error.rebuild() for each in group.failed.values() if each.is_secondary]
    seen = [each for error in errors for each in error_chain(error) if isinstance(each, RankFailed)]
    missing = {each.rank for each in seen if not each.was_reported}
    ended = group.values.keys() | group.failed.keys() | group.exit_notices.keys()
    return set(range(group.world_size)) - ended - missing
