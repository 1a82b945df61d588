"""The mailbox actor between the caller of `RayLauncher.run` and the workers, and its two ends."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from heliograph.core.distributed.failure import Carried
from heliograph.spi import require

from ..session import Notice

INTERVAL = 0.5  # seconds between two exchanges with the mailbox while there is nothing to send
RELEASE_INTERVAL = 0.1  # the same while a failed worker waits for its release
logger = logging.getLogger("heliograph")


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of the launcher, as received by its workers.

    Attributes:
        name: the id of the call, the same in all its attempts.
        fit: the id of the call of Ray's `fit`, different in each attempt.
        mailbox: the handle of the actor between the workers and the caller.
        payload: the pickled function and arguments.
        grace: seconds that the other workers have to end after one has failed.
        has_own_storage: whether to ignore the stored reports of other calls.
    """

    name: str
    fit: str
    mailbox: Any
    payload: bytes
    grace: float
    has_own_storage: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is about to call the function.

    Attributes:
        world_size: the number of workers.
        node: the id of the worker's node.
    """

    world_size: int
    node: str


@dataclass(frozen=True, slots=True)
class QueueItem:
    """A pickled object from a rank's queue."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Value:
    """The pickled return value of the function."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised.

    Attributes:
        error: the exception.
        is_secondary: whether it was raised only because another process failed.
        is_exit: whether it is a SystemExit with status 0.
    """

    error: Carried
    is_secondary: bool
    is_exit: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The function ended because of a notice."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class Ended:
    """A training ended without an error; its pickled result."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Reported:
    """Metrics were reported to Ray.

    Attributes:
        metrics: the metrics.
        path: the folder of the report in the storage; None for a report without files.
    """

    metrics: dict[str, float]
    path: str | None


@dataclass(frozen=True, slots=True)
class ProgressUpdate:
    """The progress of a run, counted by this worker.

    Attributes:
        run: its name.
        batches: batches trained on.
        steps: optimizer steps.
        samples: samples trained on.
    """

    run: str
    batches: int
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run starts, from the beginning or from a checkpoint.

    Attributes:
        run: its name.
        batches: batches trained on before, counted by this worker.
        steps: optimizer steps before.
        path: the checkpoint; None if the run starts from the beginning, or its state was not loaded from a file.
    """

    run: str
    batches: int
    steps: int
    path: Path | None


Message = Started | QueueItem | Value | Failed | Exited | Ended | Reported | ProgressUpdate | Resumed


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and its sender.

    Attributes:
        fit: the id of the call of Ray's `fit` that the worker belongs to.
        group_id: the id of its worker group.
        rank: its rank.
        message: the message.
    """

    fit: str
    group_id: str
    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Commands:
    """The caller's commands for the workers.

    Attributes:
        stop: why a run must stop, by decision of a search; None if it continues.
        exit: why the workers must save and exit; None if they continue.
        released: the ids of the worker groups whose failed workers need not wait for the others.
    """

    stop: Notice | None = None
    exit: Notice | None = None
    released: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of kept workers.

    Attributes:
        fit: the id of the call of Ray's `fit` that they belong to; other workers end.
        call: the id of the attempt of a call; empty if they wait for the next one.
        reference: a list with the reference to the call, so that Ray does not replace it by the call itself.
    """

    fit: str = ""
    call: str = ""
    reference: Sequence[Any] = ()


class Mailbox:
    """An actor with the envelopes for the caller and the calls and commands for the workers."""

    def __init__(self) -> None:
        self._assignment = Assignment()
        self._assigned = asyncio.Condition()
        self._reset()

    def _reset(self) -> None:
        self._envelopes: list[Envelope] = []
        self._commands = Commands()
        self._group_ids: list[str] = []
        self._arrived = asyncio.Event()

    async def register_group(self, group_id: str) -> int:
        if group_id not in self._group_ids:
            self._group_ids.append(group_id)
        return self._group_ids.index(group_id) + 1

    async def reset(self) -> None:
        self._reset()

    async def assign(self, assignment: Assignment) -> None:
        async with self._assigned:
            self._assignment = assignment
            self._assigned.notify_all()

    async def next_call(self, fit: str, done: str) -> Sequence[Any] | None:
        """Wait for the call after `done`; return the reference to it in a list, or None if the worker must end."""
        async with self._assigned:
            await self._assigned.wait_for(
                lambda: fit != self._assignment.fit or self._assignment.call not in ("", done)
            )
            return self._assignment.reference if fit == self._assignment.fit else None

    async def put(self, envelopes: Sequence[Envelope]) -> Commands:
        if envelopes:
            self._envelopes += envelopes
            self._arrived.set()
        return self._commands

    async def receive(self, timeout: float) -> list[Envelope]:
        if not self._envelopes:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        envelopes, self._envelopes = self._envelopes, []
        self._arrived.clear()
        return envelopes

    async def command(self, commands: Commands) -> None:
        self._commands = commands


class DriverChannel:
    """The caller's end of a new mailbox, which runs on the caller's node so that both are lost together.

    Attributes:
        mailbox: the handle of the actor, for the workers.
    """

    def __init__(self) -> None:
        ray = require("ray", "RayLauncher", extra="ray")
        strategies = require("ray.util.scheduling_strategies", "RayLauncher", extra="ray")
        own_node = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._ray = ray
        self.mailbox: Any = ray.remote(num_cpus=0)(Mailbox).options(scheduling_strategy=own_node).remote()

    def receive(self, timeout: float) -> list[Envelope]:
        envelopes: list[Envelope] = self._ray.get(self.mailbox.receive.remote(timeout))
        return envelopes

    def command(self, commands: Commands) -> None:
        self._ray.get(self.mailbox.command.remote(commands))

    def reset(self) -> None:
        self._ray.get(self.mailbox.reset.remote())

    def assign(self, fit: str, call: WorkerCall | None) -> None:
        assignment = Assignment(fit) if call is None else Assignment(fit, call.fit, [self._ray.put(call)])
        self._ray.get(self.mailbox.assign.remote(assignment))

    def dismiss(self) -> None:
        self._ray.get(self.mailbox.assign.remote(Assignment()))

    def close(self) -> None:
        self._ray.kill(self.mailbox)


class WorkerChannel:
    """The worker's end: sends a rank's messages in order and receives the caller's commands, in a thread.

    If the mailbox is gone, the caller no longer waits for this worker, and the process exits.

    Args:
        mailbox: the handle of the actor.
        fit: the id of the call of Ray's `fit` that this worker belongs to.
        group_id: the id of its worker group.
        rank: its rank.

    Attributes:
        commands: the newest commands.
        progress: the progress of the run; sent with each exchange if it has changed, so that the caller also has the
            progress of a worker that hangs or is killed.
    """

    def __init__(self, mailbox: Any, fit: str, group_id: str, rank: int) -> None:
        self._ray = require("ray", "RayLauncher", extra="ray")
        self._mailbox, self._sender = mailbox, (fit, group_id, rank)
        self._group_id = group_id
        self._outgoing: SimpleQueue[Message | threading.Event | None] = SimpleQueue()
        self.commands = Commands()
        self.progress: ProgressUpdate | None = None
        self._thread = threading.Thread(target=self._exchange, name="heliograph-worker-channel", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._outgoing.put(message)

    def flush(self) -> None:
        delivered = threading.Event()
        self._outgoing.put(delivered)
        delivered.wait()

    def wait_for_release(self, seconds: float) -> None:
        limit = monotonic() + seconds
        while self._group_id not in self.commands.released and monotonic() < limit:
            threading.Event().wait(RELEASE_INTERVAL)
            self.flush()

    def close(self) -> None:
        self._outgoing.put(None)
        self._thread.join()

    def _exchange(self) -> None:
        is_closing = False
        sent: ProgressUpdate | None = None
        while not is_closing:
            items = self._collect()
            is_closing = None in items
            envelopes = [
                Envelope(*self._sender, item) for item in items if not isinstance(item, threading.Event | None)
            ]
            progress = self.progress
            if progress is not None and progress is not sent:
                envelopes.append(Envelope(*self._sender, progress))
                sent = progress
            try:
                self.commands = self._ray.get(self._mailbox.put.remote(envelopes))
            except Exception as error:  # noqa: BLE001  # without this thread, the worker would wait forever
                logger.error("this worker exits: the process that called RayLauncher.run cannot be reached: %s", error)
                os._exit(1)
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()

    def _collect(self) -> list[Message | threading.Event | None]:
        try:
            items = [self._outgoing.get(timeout=INTERVAL)]
        except Empty:
            return []
        while not self._outgoing.empty():
            items.append(self._outgoing.get())
        return items
