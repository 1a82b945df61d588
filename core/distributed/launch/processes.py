"""The ranks, as the process sees them that launched them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .child import enter
from .queue import Frame, receive, send

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
        self._process = spawn.Process(target=enter, args=(theirs, rank, call, grace), name=f"rank-{rank}", daemon=False)
        with theirs, environment(variables), _interrupts_blocked():
            self._process.start()
        self._reader = Thread(target=self._read, name="heliograph-launch", daemon=True)
        self._reader.start()
        self._waiter = Thread(target=self._wait, name="heliograph-launch", daemon=True)
        self._waiter.start()

    @property
    def status(self) -> int:
        """How the process ended: its exit status, or minus the number of the signal that ended it."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def acknowledge(self) -> None:
        """Tell it that its report has arrived."""
        with suppress(OSError):  # it may have died since
            send(self._pipe, Frame("acknowledged"))

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
