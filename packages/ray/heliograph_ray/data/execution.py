"""The execution of a Ray dataset by an actor for all ranks."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

from heliograph.events import Engine
from heliograph.spi import require

from .distributor import PURPOSE, RowDistributor

logger = logging.getLogger("heliograph")


def copy_dataset(dataset: Any) -> Any:
    """Return a copy of a dataset with options of its own."""
    ray = require("ray", PURPOSE, extra="ray")
    return ray.get(ray.put(dataset))


def start_shared_distributor(dataset: Any, engine: Engine, *, prefetch: int) -> Any:
    """Return the handle of a `RowDistributor` for all ranks, an actor on the main rank's node. A collective.

    Args:
        dataset: the dataset; the main rank's is executed.
        engine: connects the ranks.
        prefetch: how many pieces each rank requests at once.

    Raises:
        RuntimeError: this process is not connected to Ray.
    """
    ray = require("ray", PURPOSE, extra="ray")
    if not ray.is_initialized():
        raise RuntimeError(
            "This process is not connected to Ray, so it cannot read a Ray dataset: start the ranks with RayLauncher, "
            "or call ray.init(address=...) in each of them."
        )
    context, actor = ray.get_runtime_context(), None
    name = f"heliograph-{uuid4()}"
    if engine.is_main:
        warn_if_full()
        strategies = require("ray.util.scheduling_strategies", PURPOSE, extra="ray")
        own_node = strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "max_concurrency": prefetch * engine.world_size}
        kind = ray.remote(RowDistributor).options(scheduling_strategy=own_node, **options)
        actor = kind.remote(dataset, engine.world_size)
    name, namespace = engine.broadcast((name, context.namespace))
    return ray.get_actor(name, namespace) if actor is None else actor


def kill_distributor(distributor: Any) -> None:
    """Kill the actor and what it executes; if only its handles were deleted, it would first serve all requests."""
    ray = require("ray", PURPOSE, extra="ray")
    if ray.is_initialized():
        ray.kill(distributor)


def warn_if_full() -> None:
    """Warn if a dataset will wait because workers use all CPUs."""
    if not require("ray", PURPOSE, extra="ray").available_resources().get("CPU", 0):
        logger.warning(
            "No CPU of the Ray cluster is free, so a Ray dataset waits until one is: give the workers fewer CPUs "
            "(resources_per_worker), or the cluster more."
        )
