"""Temporary signal handlers, and a deadline that repeats a signal."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

REPEAT = 1.0  # seconds until the signal is sent again, because other code may swallow its exception


class SignalHook:
    """Call `handle(signum)` for some signals, then their previous Python handlers, until these are restored.

    Args:
        signals: the signals.
        handle: called in the main thread, between any two instructions: it should only set a flag.

    Raises:
        ValueError: no signal is given, or one that cannot be handled.
    """

    def __init__(self, signals: Sequence[int], handle: Callable[[int], None]) -> None:
        uncatchable = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}  # Windows has neither
        if not signals or not set(signals) <= signal.valid_signals() - uncatchable:
            raise ValueError(f"signals= takes signals such as SIGTERM, not SIGKILL or SIGSTOP; got {signals!r}.")
        self._signals, self._handle = tuple(signals), handle
        self._previous: dict[int, Any] = {}
        self._process = 0

    @property
    def names(self) -> str:
        """The names of the signals."""
        return ", ".join(signal.Signals(signum).name for signum in self._signals)

    def install(self) -> None:
        """Install the handlers; may be called twice.

        Raises:
            ValueError: this is not the main thread, or a previous handler could not be restored.
        """
        if self._previous:
            return
        names = self.names
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(f"Handlers of {names} can only be installed in the main thread: begin the run there.")
        handlers = {signum: signal.getsignal(signum) for signum in self._signals}
        if None in handlers.values():
            raise ValueError(f"A handler of {names} was not installed from Python: leave that signal out.")
        self._process = os.getpid()
        for signum, handler in handlers.items():
            self._previous[signum] = handler
            signal.signal(signum, self._receive)

    def restore(self) -> None:
        """Restore the previous handlers, except for those replaced since; may be called twice."""
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._receive:
                signal.signal(signum, handler)
        self._previous = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        previous = self._previous.get(signum)
        if os.getpid() != self._process:  # a forked child: the signal is not for the run
            signal.signal(signum, previous or signal.SIG_DFL)
            return
        self._handle(signum)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(signum, frame)


class Deadline:
    """Send the main thread a signal some seconds after `start`, and then every second until closed.

    It uses a thread, not `signal.alarm`, which the program may use itself.

    Args:
        seconds: from `start` to the first signal.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._messages: SimpleQueue[int | None] = SimpleQueue()  # reentrant: a signal handler may put into it
        self._thread = threading.Thread(target=self._watch, name="heliograph-deadline", daemon=True)
        self._thread.start()

    def start(self, signum: int) -> None:
        """Start the countdown to `signum`; may be called in a signal handler."""
        self._messages.put(signum)

    def close(self) -> None:
        """Stop sending signals; may be called twice."""
        self._messages.put(None)
        self._thread.join()

    def _watch(self) -> None:
        signum, main = self._messages.get(), threading.main_thread().ident
        if signum is None or main is None:
            return
        delay = self.seconds
        while True:
            try:
                self._messages.get(timeout=delay)
            except Empty:
                self.is_over, delay = True, REPEAT
                _send(main, signum)
            else:
                return


def _send(thread: int, signum: int) -> None:
    # On Windows the signal is handled when the current call returns.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, signum)
    else:
        _thread.interrupt_main(signal.Signals(signum))
