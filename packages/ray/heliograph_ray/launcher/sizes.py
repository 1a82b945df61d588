"""How many workers a run may have."""

from __future__ import annotations

from collections.abc import Mapping

from heliograph.spi import require

INTERVAL = 60.0  # seconds between two checks for room


class Sizes:
    """The numbers of workers that a run may have.

    Args:
        least: the smallest number of workers.
        most: the largest number of workers.
        resources: what a worker takes of its machine, by name.
        interval: seconds between two checks for room; 60 if None.

    Attributes:
        least: the smallest number of workers.
        asked: how many workers Ray is asked for.
        resources: the resources of a worker, without those of which it takes 0.
        interval: seconds between two checks for room.
    """

    def __init__(self, least: int, most: int, resources: Mapping[str, float], interval: float | None) -> None:
        self.least, self._most = least, most
        self.asked: int | tuple[int, int] = least if least == most else (least, most)
        self.resources = {name: amount for name, amount in resources.items() if amount}
        self.interval = INTERVAL if interval is None else interval

    def has_room_for_more(self, world_size: int) -> bool:
        """Return whether the cluster has room for more than `world_size` workers, and more are allowed."""
        return world_size < self._most and self._count_free() > 0

    def _count_free(self) -> int:
        """Return for how many workers the machines have room; for all if they take nothing."""
        if not self.resources:
            return self._most
        state = require("ray._private.state", "RayLauncher", extra="ray")
        return sum(
            min(int(free.get(name, 0.0) // amount) for name, amount in self.resources.items())
            for free in state.available_resources_per_node().values()
        )
