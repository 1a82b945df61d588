"""Handlers of signals that are installed for a while, before the former handlers."""

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
    """Calls `handle(signum)` for some signals, then the former Python handler; restores these at the end.

    Args:
        signals: which.
        handle: called in the main thread, between any two instructions of it: it should only set a flag.

    Raises:
        ValueError: no signal is given, or one that nobody can handle.
    """

    def __init__(self, signals: Sequence[int], handle: Callable[[int], None]) -> None:
        deaf = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}  # Windows has neither
        if not signals or not set(signals) <= signal.valid_signals() - deaf:
            raise ValueError(f"signals are some such as signal.SIGTERM, but not SIGKILL or SIGSTOP; got {signals!r}.")
        self._signals, self._handle = tuple(signals), handle
        self._former: dict[int, Any] = {}
        self._process = 0

    def install(self) -> None:
        """Hear the signals from now on; installing twice does nothing.

        Raises:
            ValueError: this is not the main thread, or a handler is there that could not be given back.
        """
        if self._former:
            return
        names = ", ".join(signal.Signals(each).name for each in self._signals)
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(f"Handlers of {names} can be installed in the main thread only: begin the run there.")
        former = {each: signal.getsignal(each) for each in self._signals}
        if None in former.values():
            raise ValueError(
                f"A handler of {names} was installed by other than Python code, and so could not be given back: leave "
                f"that signal out."
            )
        self._process = os.getpid()
        for each, handler in former.items():
            self._former[each] = handler
            signal.signal(each, self._receive)

    def restore(self) -> None:
        """Give back what was there before, unless somebody else has installed a handler since; twice does nothing."""
        for each, former in self._former.items():
            if signal.getsignal(each) == self._receive:
                signal.signal(each, former)
        self._former = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        former = self._former.get(signum)
        if os.getpid() != self._process:  # a forked child, which the first signal is not meant for
            signal.signal(signum, former or signal.SIG_DFL)
            return
        self._handle(signum)
        if callable(former) and former is not signal.default_int_handler:
            former(signum, frame)


class Deadline:
    """Sends the main thread a signal, some seconds after `start`, and again every second until it is closed.

    A thread does so, not the process's alarm clock: that one may be in use.

    Args:
        seconds: from `start` to the first one.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.is_over = False
        self._messages: SimpleQueue[int | None] = SimpleQueue()  # a signal handler may put into this kind
        self._thread = threading.Thread(target=self._watch, name="heliograph-deadline", daemon=True)
        self._thread.start()

    def start(self, signum: int) -> None:
        """Begin to count; called from the handler of `signum`, which is sent again when the time is over."""
        self._messages.put(signum)

    def close(self) -> None:
        """Send nothing any more; closing twice does nothing."""
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
    """Send a signal to the main thread; on Windows, it is seen there when the call that it is in returns."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(thread, signum)
    else:
        _thread.interrupt_main(signal.Signals(signum))
