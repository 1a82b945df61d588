"""Calls and messages between the process that called `RayLauncher.run` and the workers, by way of an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heliograph.core.distributed.exceptions import Carried
from heliograph.spi import require

from ..session import Notice

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the launcher, as its workers get it.

    Attributes:
        name: the id of the call; the same in all its attempts.
        fit: the id of the call of Ray's `fit`; another one in each attempt.
        mailbox: the handle of the actor between the workers and the caller.
        payload: the function and its arguments, pickled.
        grace: seconds that the other workers have to end after one has failed.
        has_own_storage: whether what other calls have stored there is not to be resumed.
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
    """An object that was put into a rank's queue, pickled."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Value:
    """What the function returned, pickled."""

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
    """A training ended without an error; its result, pickled."""

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
    """What the caller asks of the workers.

    Attributes:
        stop: why a run has to stop, decided by a search on what was reported; None if it continues.
        exit: why the workers have to save and exit; None if they continue.
        released: the ids of the worker groups whose failed workers need not wait for the others any longer.
    """

    stop: Notice | None = None
    exit: Notice | None = None
    released: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Assignment:
    """What workers that are kept have to do.

    Attributes:
        fit: the id of the call of Ray's `fit` that they belong to; other workers end.
        call: the id of the attempt of a call; empty if they wait for the next one.
        reference: to the call, in a list, so that Ray does not replace it by the call itself.
    """

    fit: str = ""
    call: str = ""
    reference: Sequence[Any] = ()


class Mailbox:
    """An actor that keeps envelopes until the caller receives them, and the calls and commands for the workers."""

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
        """Return the number of a worker group, counted from 1 in the order of their first calls."""
        if group_id not in self._group_ids:
            self._group_ids.append(group_id)
        return self._group_ids.index(group_id) + 1

    async def reset(self) -> None:
        """Drop what is left of an earlier call."""
        self._reset()

    async def assign(self, assignment: Assignment) -> None:
        """Replace the assignment."""
        async with self._assigned:
            self._assignment = assignment
            self._assigned.notify_all()

    async def next_call(self, fit: str, done: str) -> Sequence[Any] | None:
        """Wait for a call; return the reference to it, in a list, or None if the worker has to end.

        Args:
            fit: the id of the call of Ray's `fit` that the worker belongs to.
            done: the id of the call that it has done; empty before the first.
        """
        async with self._assigned:
            await self._assigned.wait_for(
                lambda: fit != self._assignment.fit or self._assignment.call not in ("", done)
            )
            return self._assignment.reference if fit == self._assignment.fit else None

    async def put(self, envelopes: Sequence[Envelope]) -> Commands:
        """Keep envelopes; return the current commands."""
        if envelopes:
            self._envelopes += envelopes
            self._arrived.set()
        return self._commands

    async def receive(self, timeout: float) -> list[Envelope]:
        """Return the envelopes that have arrived; wait at most `timeout` seconds for the first one."""
        if not self._envelopes:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        envelopes, self._envelopes = self._envelopes, []
        self._arrived.clear()
        return envelopes

    async def command(self, commands: Commands) -> None:
        """Replace the commands for the workers."""
        self._commands = commands


class DriverChannel:
    """The caller's end of a new mailbox, on the caller's node: if that node is lost, both are.

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
        """Return the envelopes that have arrived; wait at most `timeout` seconds for the first one."""
        envelopes: list[Envelope] = self._ray.get(self.mailbox.receive.remote(timeout))
        return envelopes

    def command(self, commands: Commands) -> None:
        """Replace the commands for the workers, which receive them within half a second."""
        self._ray.get(self.mailbox.command.remote(commands))

    def reset(self) -> None:
        """Drop what is left of an earlier call."""
        self._ray.get(self.mailbox.reset.remote())

    def assign(self, fit: str, call: Call | None) -> None:
        """Give a call to the workers of a `fit` that are kept; without one, they wait."""
        assignment = Assignment(fit) if call is None else Assignment(fit, call.fit, [self._ray.put(call)])
        self._ray.get(self.mailbox.assign.remote(assignment))

    def dismiss(self) -> None:
        """End workers that wait for a call."""
        self._ray.get(self.mailbox.assign.remote(Assignment()))

    def close(self) -> None:
        """Kill the actor; workers that are still running then exit."""
        self._ray.kill(self.mailbox)
