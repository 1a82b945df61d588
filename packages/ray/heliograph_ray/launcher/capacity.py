"""The resources that workers need and that the cluster has."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from time import monotonic
from typing import Any

from heliograph.spi import require

from ..cluster import START_TIMEOUT

FIRST_WARNING = 15.0  # seconds without a worker
WARNING_INTERVAL = 60.0  # seconds
logger = logging.getLogger("heliograph")


class Sizes:
    """The allowed numbers of workers.

    Args:
        least: the smallest number.
        most: the largest number.
        resources: the resources of a worker, by name.

    Attributes:
        least: the smallest number.
        asked: the number of workers to request from Ray.
        resources: the nonzero resources of a worker.
    """

    def __init__(self, least: int, most: int, resources: Mapping[str, float]) -> None:
        self.least = least
        self.asked: int | tuple[int, int] = least if least == most else (least, most)
        self.resources = {name: amount for name, amount in resources.items() if amount}


class StartupMonitor:
    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._warn_at = sizes, monotonic() + FIRST_WARNING

    def check(self) -> None:
        if monotonic() >= self._warn_at:
            self._warn_at = monotonic() + WARNING_INTERVAL
            workers = f"{_number(self._sizes)} workers of {self._sizes.resources}"
            logger.warning("waiting for %s; %s", workers, _describe_cluster(self._sizes.resources))


def explain_start_timeout(error: BaseException | None, sizes: Sizes) -> BaseException | None:
    inner = getattr(error, "controller_failure", error)
    if type(inner).__name__ != "WorkerGroupStartupTimeoutError":
        return error
    seconds = os.environ.get(START_TIMEOUT, "60")
    timeout = TimeoutError(
        f"Ray gave up starting num_workers={_number(sizes)} workers with resources_per_worker={sizes.resources}: "
        f"{_describe_cluster(sizes.resources)}. Request less, enlarge the cluster, or increase "
        f"start_timeout={seconds} seconds."
    )
    timeout.__cause__ = error
    return timeout


def _number(sizes: Sizes) -> str:
    asked = sizes.asked
    return str(asked) if isinstance(asked, int) else f"{asked[0]}..{asked[1]}"


def _describe_cluster(wanted: Mapping[str, float]) -> str:
    ray: Any = require("ray", "RayLauncher", extra="ray")
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{name}: {free.get(name, 0.0):g} of {total.get(name, 0.0):g} free" for name in wanted)
