"""An attempt's process, as who kills it sees it."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from heliograph.packages.tests.torture.attempt import Orders, command, run_attempt
from heliograph_testing.chaos.attempts import become

Message = dict[str, Any]


class Process:
    """An attempt that runs: a copy of this process, which has imported all that it needs, or a fresh interpreter.

    It leads a process group: its loader's workers, which outlive it by seconds when it is killed, are in it too. A
    context: leaving it kills it, if that was not done.

    Args:
        orders: what to do.
        output: the file to which its output goes.
        fresh: whether it is a fresh interpreter.

    Attributes:
        messages: what it has reported so far.
        pid: of the process and of its group.
        seconds: how long it lived.
    """

    def __init__(self, orders: Orders, output: Path, *, fresh: bool = False) -> None:
        self.messages: list[Message] = []
        self._rest = b""
        self._began = monotonic()
        self._pipe, theirs = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            become(partial(_lead, orders, theirs, fresh=fresh), output)
        os.setpgid(self.pid, self.pid)
        os.close(theirs)
        os.set_blocking(self._pipe, False)
        self._end = os.pidfd_open(self.pid)
        self._ended: int | None = None
        self.seconds = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it ends, reports `now`, or the time is over; return whether it still runs.

        Args:
            seconds: since it was started; None waits on.
        """
        while seconds is None or monotonic() < self._began + seconds:
            left = None if seconds is None else max(0.0, self._began + seconds - monotonic())
            ready, _, _ = select.select([self._pipe, self._end], [], [], left)
            self._read()
            if self._end in ready:
                return False
            if any(message["what"] == "now" for message in self.messages):
                return True
        return True

    def kill(self) -> int:
        """Kill the process, not its group, if it lives; return how it ended."""
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)
            self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.seconds = monotonic() - self._began
            self._read()
            os.close(self._pipe)
            os.close(self._end)
        return self._ended

    def reported(self, what: str) -> list[Message]:
        """Return the messages of a kind."""
        return [message for message in self.messages if message["what"] == what]

    @property
    def place(self) -> str:
        """Where it was when it reported something for the last time."""
        last = self.messages[-1] if self.messages else {"what": "nothing"}
        during = f", {last['name']}" if last["what"] in ("operation", "now") else ""
        if not self.reported("began"):
            return f"beginning{during}"
        return f"saving{during}" if during or len(self.reported("save")) > len(self.reported("saved")) else "training"

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            if not piece:
                return
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self.messages += map(json.loads, lines)


def _lead(orders: Orders, pipe: int, *, fresh: bool) -> None:
    if fresh:
        os.set_inheritable(pipe, True)
        os.execv(sys.executable, command(orders, pipe))
    run_attempt(orders, pipe)
