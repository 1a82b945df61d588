"""What a cluster that has no room for workers has: in warnings while they wait, and in the error of a time-out."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from time import monotonic
from typing import Any

from heliograph.spi import require

from ..cluster import START_TIMEOUT
from .sizes import Sizes

FIRST_WARNING = 15.0  # seconds without a worker
WARNING_INTERVAL = 60.0  # seconds
OF_A_GROUP = re.compile(r"_group_(\d+_)?[0-9a-f]{16,}$")  # CPU_group_1_<id>: what a placement group has reserved of CPU

logger = logging.getLogger("heliograph")


class StartupMonitor:
    """Warns what workers wait for, as long as none has started.

    Args:
        sizes: how many workers, and what each takes.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._warn_at = sizes, monotonic() + FIRST_WARNING

    def check(self) -> None:
        """Warn if a warning is due."""
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARNING_INTERVAL
            workers = f"{_number(self._sizes)} workers of {self._sizes.resources}"
            logger.warning("waiting for %s: %s", workers, _describe_cluster(self._sizes.resources))


def explain_start_timeout(error: BaseException | None, sizes: Sizes) -> BaseException | None:
    """Return Ray's error; if Ray gave up waiting for resources, a TimeoutError that it is the cause of."""
    inner = getattr(error, "controller_failure", error)
    if type(inner).__name__ != "WorkerGroupStartupTimeoutError":
        return error
    seconds = os.environ.get(START_TIMEOUT, "60")
    timeout = TimeoutError(
        f"Ray gave up starting num_workers={_number(sizes)} workers with resources_per_worker={sizes.resources}: "
        f"{_describe_cluster(sizes.resources)}. Ask for less, give the cluster more, or raise "
        f"start_timeout={seconds} seconds."
    )
    timeout.__cause__ = error
    return timeout


def _number(sizes: Sizes) -> str:
    asked = sizes.asked
    return str(asked) if isinstance(asked, int) else f"{asked[0]}..{asked[1]}"


def _describe_cluster(wanted: Mapping[str, float]) -> str:
    ray: Any = require("ray", "RayLauncher", extra="ray")
    total, free = _select(ray.cluster_resources(), wanted), _select(ray.available_resources(), wanted)
    return f"the cluster has {total}, of which {free} are free"


def _select(resources: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the resources without names of nodes and shares of placement groups; memory only if it is wanted."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name in wanted or not (name.startswith("node:") or name.endswith("memory") or OF_A_GROUP.search(name))
    }
