"""What the workers tell the process that called a run on Ray, what it tells them, and the actor between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....core.distributed.launch.exceptions import Carried
from ....core.system.extras import require
from ..session import Notice

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is about to call the function.

    Attributes:
        world_size: how many workers there are.
        node: the id of its node.
    """

    world_size: int
    node: str


@dataclass(frozen=True, slots=True)
class Told:
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
        follows: whether it failed only because another process did.
        is_exit: whether it merely asked to exit, with status 0.
    """

    error: Carried
    follows: bool
    is_exit: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """The function ended because the run was asked to leave its machine."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class Ended:
    """A training ended without an error; its result, pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Reported:
    """Something was reported to Ray.

    Attributes:
        metrics: what was measured.
        path: where the storage has what came with it; None where nothing did.
    """

    metrics: dict[str, float]
    path: str | None


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where a run is, by this worker's counters of what it trained on.

    Attributes:
        run: its name, which tells it from others that the function trains.
        batches: that were trained on.
        steps: optimizer steps.
        samples: that were trained on.
    """

    run: str
    batches: int
    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run begins, or goes on from a checkpoint.

    Attributes:
        run: its name.
        batches: what had been trained on, by this worker's counter.
        steps: optimizer steps until then.
        path: the file; None where it begins afresh, or the state came from elsewhere.
    """

    run: str
    batches: int
    steps: int
    path: Path | None


Message = Started | Told | Value | Failed | Left | Ended | Reported | Pulse | Resumed


@dataclass(frozen=True, slots=True)
class Letter:
    """A message, and whose it is.

    Attributes:
        fit: which of Ray's runs the worker belongs to.
        incarnation: which of the worker groups of that one.
        rank: of which worker.
        message: what it says.
    """

    fit: str
    incarnation: str
    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Orders:
    """What the caller tells the workers.

    Attributes:
        stop: why a run is to stop, as a search decides by what it reports; None as long as it is not.
        leave: why the workers are to save and end, as the caller does; None as long as they are not.
        released: the worker groups whose failed workers need not wait for the others any longer.
    """

    stop: Notice | None = None
    leave: Notice | None = None
    released: frozenset[str] = frozenset()


class Mailbox:
    """An actor that keeps letters until the caller takes them, and its orders for the workers."""

    def __init__(self) -> None:
        self._letters: list[Letter] = []
        self._orders = Orders()
        self._incarnations: list[str] = []
        self._arrived = asyncio.Event()

    async def begin(self, incarnation: str) -> int:
        """Return which worker group of all this is, from 1."""
        if incarnation not in self._incarnations:
            self._incarnations.append(incarnation)
        return self._incarnations.index(incarnation) + 1

    async def put(self, letters: Sequence[Letter]) -> Orders:
        """Keep letters; return the orders as they are now."""
        if letters:
            self._letters += letters
            self._arrived.set()
        return self._orders

    async def take(self, timeout: float) -> list[Letter]:
        """Return the letters that have come, and wait some seconds for the first one."""
        if not self._letters:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        letters, self._letters = self._letters, []
        self._arrived.clear()
        return letters

    async def order(self, orders: Orders) -> None:
        """Give the workers other orders."""
        self._orders = orders


class Desk:
    """The caller's side of a mailbox, which is made here, on the caller's node: who loses that node loses both.

    Attributes:
        mailbox: the actor, as the workers get it.
    """

    def __init__(self) -> None:
        ray = require("ray", "RayLauncher", extra="ray")
        strategies = require("ray.util.scheduling_strategies", "RayLauncher", extra="ray")
        here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._ray = ray
        self.mailbox: Any = ray.remote(num_cpus=0)(Mailbox).options(scheduling_strategy=here).remote()

    def take(self, timeout: float) -> list[Letter]:
        """Return the letters that have come, and wait some seconds for the first one."""
        letters: list[Letter] = self._ray.get(self.mailbox.take.remote(timeout))
        return letters

    def order(self, orders: Orders) -> None:
        """Give the workers other orders; they hear of them within half a second."""
        self._ray.get(self.mailbox.order.remote(orders))

    def close(self) -> None:
        """End the actor: workers that are still there then end themselves."""
        self._ray.kill(self.mailbox)
