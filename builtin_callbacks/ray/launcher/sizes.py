"""How many workers a run may have, where not every number will do."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from ....core.system.extras import require

LOOK = 60.0  # seconds between two looks for room
NEVER = 1e9  # seconds until Ray looks for it itself


class Sizes:
    """The numbers of workers that share the work of a step evenly, and how many Ray is asked for.

    Ray takes as many workers as there is room for, seven of eight, say. Where only some numbers will do, workers of
    another number leave at once, and Ray is asked for no more than the next smaller number that will do. That there is
    room for a larger one is looked for here, as Ray would grow to any number.

    Args:
        least: workers.
        most: workers.
        as_ranks: what each number is to divide; None for any number.
        resources: what a worker takes of its machine, by name.
        interval: seconds between two looks for room; 60 if None.

    Attributes:
        allowed: the numbers that will do.
        resources: what a worker takes, without what it takes nothing of.
    """

    def __init__(
        self, least: int, most: int, as_ranks: int | None, resources: Mapping[str, float], interval: float | None
    ) -> None:
        self.allowed = tuple(each for each in range(least, most + 1) if as_ranks is None or as_ranks % each == 0)
        if not self.allowed:
            raise ValueError(
                f"No number of workers from {least} to {most} divides as_ranks={as_ranks}: give num_workers that do."
            )
        self._grows = as_ranks is not None  # else Ray looks for room itself
        self.resources = {name: amount for name, amount in resources.items() if amount}
        self._interval = self._pause = LOOK if interval is None else interval
        self._limit = self.allowed[-1]
        self._look_at = monotonic() + self._interval

    @property
    def asked(self) -> int | tuple[int, int]:
        """How many workers Ray is asked for now."""
        least = self.allowed[0]
        return least if least == self._limit else (least, self._limit)

    def settle(self, world_size: int) -> None:
        """Ask for fewer, where workers of a number that will not do have left."""
        if world_size not in self.allowed:
            self._limit = max(each for each in self.allowed if each < world_size)
            self._pause *= 2  # there was not the room that it looked as if there was
        else:
            self._pause = self._interval
        self._look_at = monotonic() + self._pause

    def room(self, world_size: int) -> str | None:
        """Return why so many workers are to be started anew: there is room for more that will do; None if not."""
        if not self._grows or world_size >= self.allowed[-1] or monotonic() < self._look_at:
            return None
        self._look_at = monotonic() + self._pause
        free = self._free()
        fitting = [each for each in self.allowed if world_size < each <= world_size + free]
        if not fitting:
            return None
        self._limit = fitting[-1]
        return f"there is room for {self._limit} workers"

    def _free(self) -> int:
        """Return for how many workers there is room, machine by machine; for all of them where they take nothing."""
        if not self.resources:
            return self.allowed[-1]
        state = require("ray._private.state", "RayLauncher", extra="ray")
        return sum(
            min(int(free.get(name, 0.0) // amount) for name, amount in self.resources.items())
            for free in state.available_resources_per_node().values()
        )
