"""A rank's own side of `launch`: run the function, report, and leave."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ....events.errors import describe_error
from .exceptions import carry
from .queue import Frame, open_queue, receive, send


class Line:
    """The line to the parent. Threads write and read it, as a signal might tear what the main thread writes.

    Args:
        pipe: to the parent.
        grace: seconds that this process has left to end when the parent is gone.
    """

    def __init__(self, pipe: Connection, grace: float) -> None:
        self._pipe, self._grace = pipe, grace
        self._outgoing: SimpleQueue[Frame] = SimpleQueue()
        self._acknowledged = threading.Event()
        for target in (self._write, self._read):
            threading.Thread(target=target, name="heliograph-launch", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a frame without waiting."""
        self._outgoing.put(frame)

    def report(self, frame: Frame) -> None:
        """Send how this rank ended, and wait until the parent has it, or is gone."""
        self.send(frame)
        self._acknowledged.wait()

    def _write(self) -> None:
        with suppress(OSError):  # the parent is gone: the reading thread sees to that
            while True:
                send(self._pipe, self._outgoing.get())

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                receive(self._pipe, -1)
                self._acknowledged.set()
        self._acknowledged.set()
        os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: end as upon a cluster's signal
        threading.Event().wait(self._grace)
        os._exit(1)


def enter(pipe: Connection, rank: int, call: bytes, grace: float) -> None:
    """Be a rank; do not return.

    Args:
        pipe: to the parent.
        rank: this process's number.
        call: the function and its arguments, pickled.
        grace: seconds that it has left to end when the parent is gone.
    """
    if hasattr(os, "setpgid"):  # Windows has none
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes once, by way of the parent
    send(pipe, Frame("began"))
    line = Line(pipe, grace)
    open_queue(lambda message: line.send(Frame("message", payload=message)))
    report = _run(rank, call)
    _flush()
    line.report(report)
    _leave()


def _run(rank: int, call: bytes) -> Frame:
    try:
        _block_interrupts(signal.SIG_UNBLOCK)
        function, args, kwargs = _load(call)
        return Frame("value", payload=_dump(function(*args, **kwargs), rank))
    except BaseException as error:  # noqa: BLE001  # raised in the parent
        return Frame("error", payload=pickle.dumps(carry(error)))
    finally:
        _block_interrupts(signal.SIG_BLOCK)


def _block_interrupts(how: int) -> None:
    """Block Ctrl-C or let it through again. The parent starts its children with it blocked."""
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        signal.pthread_sigmask(how, {signal.SIGINT})


def _load(call: bytes) -> Any:
    try:
        return pickle.loads(call)  # noqa: S301  # from our own parent
    except Exception as error:
        raise TypeError(
            f"launch could not load the function or its arguments in a new process: {describe_error(error)}. "
            f"What they are made of must be defined at module level in files that this process can import; in the "
            f'script itself, outside of `if __name__ == "__main__":`.'
        ) from error


def _dump(value: Any, rank: int) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"Rank {rank} returned a {type(value).__qualname__} that cannot be pickled, and so cannot be sent to the "
            f"process that called launch: {error}. Return plain data, or nothing."
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # None, closed, or nobody reads it
            stream.flush()


def _leave() -> None:
    """End as the interpreter does, but for destroying what C++ code holds: gloo may abort the process at that."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(0)
