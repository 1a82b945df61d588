"""Ranks from their start to their end."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from ...system.signals import SignalHook
from .exceptions import Failure, died, raise_first, rebuild
from .processes import RankProcess, hosting, variables
from .queue import Frame

PASSED_ON = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
TICK = 1.0  # seconds until a signal is handled that came just before the wait began, which it then does not interrupt

logger = logging.getLogger("heliograph")


class Job:
    """Ranks that run one call.

    Args:
        call: the function and its arguments, pickled.
        count: how many ranks.
        grace: seconds that the others have when one has failed.
        on_message: called with rank and object for what is put into a rank's queue.
    """

    def __init__(self, call: bytes, count: int, grace: float, on_message: Callable[[int, Any], object]) -> None:
        self._call, self._count, self._grace, self._on_message = call, count, grace, on_message
        self._events: SimpleQueue[Frame] = SimpleQueue()  # a signal handler may put into this kind
        self._processes: list[RankProcess] = []
        self._failures: list[Failure] = []
        self._killed: list[int] = []
        self._sent: set[int] = set()
        self._deadline: float | None = None

    def run(self) -> list[Any]:
        """Run the ranks; return their values, by rank.

        Raises:
            BaseException: what a rank raised.
        """
        with ExitStack() as stack:
            store = stack.enter_context(hosting())
            self._listen(stack)
            for rank in range(self._count):
                process = RankProcess(rank, variables(rank, self._count, store), self._call, self._grace, self._events)
                stack.callback(process.close)
                self._processes.append(process)
            while not all(process.ended for process in self._processes):
                self._wait()
        raise_first(self._failures, self._killed, self._grace, self._sent)
        return [self._value(process) for process in self._processes]

    def _listen(self, stack: ExitStack) -> None:
        """Handle the signals that are to be passed on, except those that this process ignores."""
        signals = [each for each in PASSED_ON if signal.getsignal(each) not in (signal.SIG_IGN, None)]
        if signals and threading.current_thread() is threading.main_thread():
            hook = SignalHook(signals, lambda signum: self._events.put(Frame("signal", signum=signum)))
            stack.callback(hook.restore)
            hook.install()

    def _wait(self) -> None:
        """Wait for the next event, and act on it."""
        if self._deadline is not None and monotonic() >= self._deadline:
            self._deadline = None
            self._give_up()
        left = TICK if self._deadline is None else max(0.0, min(TICK, self._deadline - monotonic()))
        try:
            event = self._events.get(timeout=left)
        except Empty:
            return
        if event.kind == "signal":
            self._pass_on(event.signum)
        else:
            self._handle(self._processes[event.rank], event)

    def _handle(self, process: RankProcess, event: Frame) -> None:
        if event.kind == "began":
            process.began = True
        elif event.kind == "message":
            self._deliver(process.rank, event.payload)
        elif event.kind == "ended":
            process.ended = True
            if process.report is None and process.rank not in self._killed:
                self._fail(died(process.rank, process.status, began=process.began))
        else:
            process.report = event
            process.acknowledge()
            if event.kind == "error":
                carried = pickle.loads(event.payload)  # noqa: S301  # from our own child
                self._fail(Failure(rebuild(carried), carried.text, process.rank))
            if all(each.report is not None for each in self._processes):
                self._hurry()

    def _deliver(self, rank: int, payload: bytes) -> None:
        if any(failure.rank is None for failure in self._failures):
            return
        try:
            self._on_message(rank, pickle.loads(payload))  # noqa: S301  # from our own child
        except Exception as error:  # noqa: BLE001  # raised when the ranks have ended
            error.add_note(f"heliograph: while a message of rank {rank} was taken")
            self._fail(Failure(error))
            self._pass_on(signal.SIGTERM)

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        if not failure.is_no_failure:
            self._hurry()

    def _hurry(self) -> None:
        """Have the ranks end within the grace, counted from the first reason."""
        if self._deadline is None:
            self._deadline = monotonic() + self._grace

    def _give_up(self) -> None:
        for process in self._processes:
            if process.ended:
                continue
            process.kill()
            self._killed.append(process.rank)
            if process.report is not None:
                logger.warning(
                    "rank %d had reported, but did not end within %g s, and was killed", process.rank, self._grace
                )

    def _pass_on(self, signum: int) -> None:
        """Pass a signal on to the ranks; upon a second Ctrl-C, leave: what is left is killed."""
        if signum == signal.SIGINT and signum in self._sent:
            raise KeyboardInterrupt
        self._sent.add(signum)
        for process in self._processes:
            process.pass_on(signum)

    def _value(self, process: RankProcess) -> Any:
        assert process.report is not None
        try:
            return pickle.loads(process.report.payload)  # noqa: S301  # from our own child
        except Exception as error:
            raise TypeError(
                f"The value of rank {process.rank} cannot be loaded in this process: {error}. Return plain data."
            ) from error
