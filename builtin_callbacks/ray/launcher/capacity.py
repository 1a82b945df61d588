"""What is said while Ray has no room for workers, and when it gives up waiting for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from time import monotonic
from typing import Any

from ....core.system.extras import require
from ..cluster import START
from .sizes import Sizes

FIRST = 15.0  # seconds without a worker until it is said for the first time
AGAIN = 60.0  # seconds until it is said again

logger = logging.getLogger("heliograph")


class Waiting:
    """Says what workers wait for, as long as none has begun.

    Args:
        sizes: how many of them, and what each takes.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._say_at = sizes, monotonic() + FIRST

    def look(self) -> None:
        """Say it when it is time to."""
        if monotonic() >= self._say_at:
            self._say_at = monotonic() + AGAIN
            logger.warning("waiting for %s: %s", _wanted(self._sizes), _there(self._sizes.resources))


def explained(error: BaseException | None, sizes: Sizes) -> BaseException | None:
    """Return Ray's error; where it gave up waiting for room, one of ours that it is the cause of."""
    inner = getattr(error, "controller_failure", error)
    if type(inner).__name__ != "WorkerGroupStartupTimeoutError":
        return error
    seconds = os.environ.get(START, "60")
    ours = TimeoutError(
        f"Ray gave up starting num_workers={_number(sizes)} workers with resources_per_worker={sizes.resources}: "
        f"{_there(sizes.resources)}. Ask for less, give the cluster more, or let each of Ray's tries wait longer than "
        f"start_timeout={seconds} seconds."
    )
    ours.__cause__ = error
    return ours


def _wanted(sizes: Sizes) -> str:
    return f"{_number(sizes)} workers of {sizes.resources}"


def _number(sizes: Sizes) -> str:
    asked = sizes.asked
    return str(asked) if isinstance(asked, int) else f"{asked[0]}..{asked[1]}"


def _there(wanted: Mapping[str, float]) -> str:
    ray: Any = require("ray", "RayLauncher", extra="ray")
    there, free = _countable(ray.cluster_resources(), wanted), _countable(ray.available_resources(), wanted)
    return f"the cluster has {there}, of which {free} are free"


def _countable(resources: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Return what a worker may take, without the names of machines, and memory where it takes none."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name in wanted or not (name.startswith("node:") or name.endswith("memory"))
    }
