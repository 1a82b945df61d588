"""How many workers a run may have, if not every number is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from heliograph.spi import require

INTERVAL = 60.0  # seconds between two checks for room
NEVER = 1e9  # seconds until Ray checks for it itself


class Sizes:
    """The numbers of workers that share the work of a step evenly, and how many Ray is asked for.

    Ray starts as many workers as there is room for, for example seven of eight. If seven is not allowed, they exit at
    once, and Ray is asked for at most the next smaller allowed number. Room for a larger number is looked for here,
    because Ray would grow to any number.

    Args:
        least: the smallest number of workers.
        most: the largest number of workers.
        as_ranks: the number that each allowed number divides; None allows any.
        resources: what a worker takes of its machine, by name.
        interval: seconds between two checks for room; 60 if None.

    Attributes:
        allowed: the allowed numbers, in ascending order.
        resources: the resources of a worker, without those of which it takes 0.
        interval: seconds between two checks for room.
    """

    def __init__(
        self, least: int, most: int, as_ranks: int | None, resources: Mapping[str, float], interval: float | None
    ) -> None:
        self.allowed = tuple(each for each in range(least, most + 1) if as_ranks is None or as_ranks % each == 0)
        if not self.allowed:
            raise ValueError(
                f"No number of workers from {least} to {most} divides as_ranks={as_ranks}: give num_workers that do."
            )
        self._grows = as_ranks is not None  # otherwise Ray checks for room itself
        self.resources = {name: amount for name, amount in resources.items() if amount}
        self.interval = self._delay = INTERVAL if interval is None else interval
        self._limit = self.allowed[-1]
        self._check_at = monotonic() + self.interval

    @property
    def asked(self) -> int | tuple[int, int]:
        """How many workers Ray is asked for now."""
        least = self.allowed[0]
        return least if least == self._limit else (least, self._limit)

    def update(self, world_size: int) -> None:
        """Ask for fewer after workers have exited because their number is not allowed."""
        if world_size not in self.allowed:
            self._limit = max(each for each in self.allowed if each < world_size)
            self._delay *= 2  # there was less room than the last check had found
        else:
            self._delay = self.interval
        self._check_at = monotonic() + self._delay

    def grow(self, world_size: int) -> str | None:
        """Ask for more if the cluster has room for a larger allowed number; return the reason, or None."""
        if not self._grows or world_size >= self.allowed[-1] or monotonic() < self._check_at:
            return None
        self._check_at = monotonic() + self._delay
        fitting = self.larger(world_size)
        if not fitting:
            return None
        self._limit = fitting[-1]
        return f"there is room for {self._limit} workers"

    def larger(self, world_size: int) -> list[int]:
        """Return the allowed larger numbers that the cluster has room for."""
        if world_size >= self.allowed[-1]:
            return []
        free = self._count_free()
        return [each for each in self.allowed if world_size < each <= world_size + free]

    def _count_free(self) -> int:
        """Return for how many workers the machines have room; for all if they take nothing."""
        if not self.resources:
            return self.allowed[-1]
        state = require("ray._private.state", "RayLauncher", extra="ray")
        return sum(
            min(int(free.get(name, 0.0) // amount) for name, amount in self.resources.items())
            for free in state.available_resources_per_node().values()
        )
