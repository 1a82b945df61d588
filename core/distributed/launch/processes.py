"""The launched processes, as the process sees them that started them."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ....events.errors import describe_error
from ...system.extras import kind_of
from .exceptions import Carried
from .queue import Frame, open_queue, receive, send

LAUNCHED = "HELIOGRAPH_LAUNCHED"  # set in the environment of a rank
DRAIN = 5.0  # seconds to read what a dead rank had written, where a process of its own keeps the pipe open


class RankProcess:
    """A rank's process. What it writes, and its end, go to `events`, each by a thread that waits for it.

    Args:
        rank: its number.
        variables: what to set in its environment.
        call: the function and its arguments, pickled.
        grace: seconds that it has left to end when this process is gone.
        events: where its frames go, and one of the kind `ended`, the last.

    Attributes:
        began: whether it got as far as the function.
        report: how it ended, as it says; None as long as it does not.
        ended: whether the process is gone.
    """

    def __init__(
        self, rank: int, variables: Mapping[str, str], call: bytes, grace: float, events: SimpleQueue[Frame]
    ) -> None:
        self.rank, self.began, self.ended = rank, False, False
        self.report: Frame | None = None
        self._events = events
        # Forked, it would inherit threads' locks without the threads; torch does not survive that.
        spawn = get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        # No daemon: those may not have children, such as the workers of a loader.
        given = theirs, rank, call, grace, get_start_method()
        self._process = spawn.Process(target=enter, args=given, name=f"rank-{rank}", daemon=False)
        with theirs, environment(variables), _interrupts_blocked():
            self._process.start()
        self._reader = self._start_reading()
        self._waiter = Thread(target=self._wait, name="heliograph-launch", daemon=True)
        self._waiter.start()

    @property
    def status(self) -> int:
        """How the process ended: its exit status, or minus the number of the signal that ended it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        """Whether the process lives."""
        return not self.ended and self._process.is_alive()

    def acknowledge(self, call: bytes = b"") -> None:
        """Answer that its report has arrived: it ends, or makes another call, pickled."""
        if call:
            self._reader.join()
            self.report, self._reader = None, self._start_reading()
        with suppress(OSError):  # it may have died since
            send(self._pipe, Frame("acknowledged", payload=call))

    def pass_on(self, signum: int) -> None:
        """Send it a signal that this process got."""
        if not self.ended and self._process.pid is not None:
            with suppress(ProcessLookupError):  # not reaped before it counts as ended, so no other process is meant
                os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Kill it, and the processes that it started, unless it has ended."""
        if not self.ended:
            self._kill_group()
            self._process.kill()

    def close(self) -> None:
        """Kill it if it lives, and leave nothing of it."""
        self.kill()
        self._waiter.join()
        self._process.join()
        if not self._reader.is_alive():
            self._pipe.close()

    def _start_reading(self) -> Thread:
        reader = Thread(target=self._read, name="heliograph-launch", daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            kind = ""
            while kind not in ("value", "error"):
                frame = receive(self._pipe, self.rank)
                kind = frame.kind
                self._events.put(frame)

    def _wait(self) -> None:
        """Wait for the process's end, and leave it to the main thread to reap it: so the number stays its own."""
        assert self._process.pid is not None
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # reaped by somebody who waits for any child
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:  # Windows
            self._process.join()
        if self._reader.is_alive():  # no report: it left without closing what it had started
            self._kill_group()
            self._reader.join(DRAIN)
        self._events.put(Frame("ended", self.rank))

    def _kill_group(self) -> None:
        if hasattr(os, "killpg") and self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it leads none, or macOS: only zombies are in it
                os.killpg(self._process.pid, signal.SIGKILL)


@contextmanager
def hosting() -> Iterator[Mapping[str, str]]:
    """Host the store by which ranks find each other, on a free port that only this machine reaches.

    Yields:
        the variables that lead a rank there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not for strict checkers

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        # The store gets the very socket: no other job can take the port in between.
        store: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=free.detach())
    try:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    finally:
        del store  # a traceback may keep this frame


def variables(rank: int, count: int, store: Mapping[str, str]) -> dict[str, str]:
    """Return what a rank's environment says of its place.

    Args:
        rank: its number.
        count: how many there are.
        store: the variables that lead to the store.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, LAUNCHED: 1}
    found = {name: str(value) for name, value in place.items()} | dict(store)
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = "1"  # as torchrun does: else every process takes all cores
    return found


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment, which a process that is started now inherits; put it back."""
    former = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C, also in a process that is started now, until that one is ready for it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class Line:
    """The line to the parent. Threads write and read it, as a signal might tear what the main thread writes.

    Args:
        pipe: to the parent.
        grace: seconds that this process has left to end when the parent is gone.
    """

    def __init__(self, pipe: Connection, grace: float) -> None:
        self._pipe, self._grace = pipe, grace
        self._outgoing: SimpleQueue[Frame] = SimpleQueue()
        self._answers: SimpleQueue[bytes] = SimpleQueue()
        for target in (self._write, self._read):
            threading.Thread(target=target, name="heliograph-launch", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send a frame without waiting."""
        self._outgoing.put(frame)

    def report(self, frame: Frame) -> bytes:
        """Send how a call ended, and wait until the parent has it, or is gone; return the next call, if any."""
        self.send(frame)
        return self._answers.get()

    def _write(self) -> None:
        with suppress(OSError):  # the parent is gone: the reading thread sees to that
            while True:
                send(self._pipe, self._outgoing.get())

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._answers.put(receive(self._pipe, -1).payload)
        self._answers.put(b"")
        os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: end as upon a cluster's signal
        threading.Event().wait(self._grace)
        os._exit(1)


def enter(pipe: Connection, rank: int, call: bytes, grace: float, start_method: str) -> None:
    """Be a rank; do not return.

    Args:
        pipe: to the parent.
        rank: this process's number.
        call: the function and its arguments, pickled; further calls come from the parent.
        grace: seconds that it has left to end when the parent is gone.
        start_method: how the parent starts processes by default, and so how this one does.
    """
    # Spawned, it would spawn its own ones, a loader's workers, too. What nobody has chosen stays open to choose.
    set_start_method(None if start_method == get_all_start_methods()[0] else start_method, force=True)
    if hasattr(os, "setpgid"):  # Windows has none
        os.setpgid(0, 0)  # a terminal's Ctrl-C comes once, by way of the parent
    send(pipe, Frame("began"))
    line = Line(pipe, grace)
    open_queue(lambda message: line.send(Frame("message", payload=message)))
    while call:
        report = _run(rank, call)
        _flush()
        call = line.report(report)
    _leave()


def _run(rank: int, call: bytes) -> Frame:
    try:
        _block_interrupts(signal.SIG_UNBLOCK)
        function, args, kwargs = _load(call)
        return Frame("value", payload=_dump(function(*args, **kwargs), rank))
    except BaseException as error:  # noqa: BLE001  # raised in the parent
        return Frame("error", payload=pickle.dumps(Carried.of(error)))
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
            f"Rank {rank} returned {kind_of(value)} that cannot be pickled, and so cannot be sent to the "
            f"process that called launch: {error}. Return plain data, or nothing."
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # None, closed, or nobody reads it
            stream.flush()


def _leave() -> None:
    """End as the interpreter does, but for destroying what C++ code holds: gloo may abort the process at that."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(0)
