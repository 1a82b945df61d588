"""A training that is asked by functions in another thread, and stops when they are done."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import heliograph as h
from heliograph.tests import kit
from heliograph_recorder import Remote
from heliograph_recorder.remote.client import RemoteRun
from heliograph_recorder.remote.messages import decode
from heliograph_recorder.remote.sockets import short

PATIENCE = 60.0  # seconds: none of these tests takes as long
Talk = Callable[[RemoteRun], object]


class Talking(h.Plugin):
    """Lets a function ask the run in a thread, from a given batch on; the run stops when it has returned."""

    affects_training = False
    asks = ("stop",)

    def __init__(self, remote: Remote, talk: Talk, *, after: int = 1) -> None:
        self.remote, self.talk, self.after = remote, talk, after
        self.thread: Thread | None = None
        self.value: Any = None
        self.error: BaseException | None = None

    @h.on(h.BatchEnd)
    def begin(self, run: h.Run, event: h.BatchEnd) -> None:
        if self.thread is None and run.progress.batches >= self.after:
            self.thread = Thread(target=self._talk)
            self.thread.start()
        if self.thread is not None and not self.thread.is_alive():
            run.control.stop("all is said")

    def _talk(self) -> None:
        assert self.remote.path is not None
        try:
            self.value = self.talk(RemoteRun(self.remote.path))
        except BaseException as error:  # noqa: BLE001  # raised in the test
            self.error = error


def train(
    folder: Path,
    talk: Talk,
    *plugins: h.Plugin,
    remote: Remote | None = None,
    data: Any = None,
    after: int = 1,
    **options: Any,
) -> tuple[Any, h.RunResult]:
    """Train until `talk` has returned; return what it did, and the result."""
    remote = Remote(folder) if remote is None else remote
    talking = Talking(remote, talk, after=after)
    options = {"steps": 1_000_000, "validation": kit.class_batches(2), **options}
    every = h.Every(steps=100_000)
    schedules: list[h.Plugin] = [h.SaveSchedule(every, at_end=False)]
    schedules += [] if options["validation"] is None else [h.ValidationSchedule(every, at_end=False)]
    trainer = h.Trainer([*schedules, *plugins, remote, h.Checkpoint(folder), talking], device="cpu")
    data = kit.class_batches(50) if data is None else data
    result = trainer.fit(kit.linear_classifier(), data, optimizer=kit.sgd(), **options)
    if talking.thread is not None:
        talking.thread.join(PATIENCE)
    if talking.error is not None:
        raise talking.error
    return talking.value, result


def raw(path: Any) -> socket.socket:
    """Return a connection on which anything can be sent."""
    if isinstance(path, tuple):
        return socket.create_connection(path, PATIENCE)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(PATIENCE)
    with short(path) as name:
        made.connect(name)
    return made


def read_lines(connection: socket.socket) -> list[dict[str, Any]]:
    """Return the messages that come until the other end disconnects."""
    received = b""
    while True:
        try:
            more = connection.recv(65536)
        except ConnectionResetError:
            more = b""
        if not more:
            return [decode(line) for line in received.splitlines()]
        received += more


def open_sockets() -> int:
    """Return how many sockets this process holds."""
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this look
            names.append(str(each.readlink()))
    return sum(name.startswith("socket:") for name in names)
