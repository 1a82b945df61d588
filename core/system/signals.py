"""Temporary signal handlers, and a deadline that sends a signal again."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

AGAIN = 1.0  # seconds until an exception that other code swallowed is raised again


class SignalHook:
    """Calls `handle(signum)` for some signals, then their former Python handlers, until these are restored.

    Args:
        signals: the signals.
        handle: called in the main thread, between any two instructions of it: it should only set a flag.

    Raises:
        ValueError: no signal is given, or one that cannot be handled.
    """

    def __init__(self, signals: Sequence[int], handle: Callable[[int], None]) -> None:
        uncatchable = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}  # Windows has neither
        if not signals or not set(signals) <= signal.valid_signals() - uncatchable:
            raise ValueError(f"signals are some such as signal.SIGTERM, but not SIGKILL or SIGSTOP; got {signals!r}.")
        self._signals, self._handle = tuple(signals), handle
        self._former: dict[int, Any] = {}
        self._process = 0

    @property
    def names(self) -> str:
        """The names of the signals."""
        return ", ".join(signal.Signals(each).name for each in self._signals)

    def install(self) -> None:
        """Install the handlers; installing twice does nothing.

        Raises:
            ValueError: this is not the main thread, or a former handler could not be restored.
        """
        if self._former:
            return
        names = self.names
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(f"Handlers of {names} can be installed in the main thread only: begin the run there.")
        former = {each: signal.getsignal(each) for each in self._signals}
        if None in former.values():
            raise ValueError(
                f"A handler of {names} was not installed from Python, so it could not be restored: "
                f"leave that signal out."
            )
        self._process = os.getpid()
        for each, handler in former.items():
            self._former[each] = handler
            signal.signal(each, self._receive)

    def restore(self) -> None:
        """Restore the former handlers, except where another was installed since; restoring twice does nothing."""
        for each, former in self._former.items():
            if signal.getsignal(each) == self._receive:
                signal.signal(each, former)
        self._former = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        former = self._former.get(signum)
        if os.getpid() != self._process:  # a forked child: the signal is not for the run
            signal.signal(signum, former or signal.SIG_DFL)
            return
        self._handle(signum)
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)


class Deadline:
    """Sends the main thread a signal some seconds after `start`, and then every second until it is closed.

    It uses a thread, not `signal.alarm`, which the program may use itself.

    Args:
        seconds: from `start` to the first signal.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._messages: SimpleQueue[int | None] = SimpleQueue()  # a signal handler may put into this kind
        self._thread = threading.Thread(target=self._watch, name="heliograph-deadline", daemon=True)
        self._thread.start()

    def start(self, signum: int) -> None:
        """Start the countdown, after which `signum` is sent; may be called in a signal handler."""
        self._messages.put(signum)

    def close(self) -> None:
        """Stop sending signals; closing twice does nothing."""
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
                self.is_over, delay = True, AGAIN
                _send(main, signum)
            else:
                return


def _send(thread: int, signum: int) -> None:
    """Send a signal to the main thread; on Windows it is handled when the present call returns."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, signum)
    else:
        _thread.interrupt_main(signal.Signals(signum))
