"""Who executes a Ray dataset: this process, or an actor for all ranks."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

from ....core.system.extras import require
from ....events import Engine
from .dealt_rows import USER, Dealer

logger = logging.getLogger("heliograph")


def copied(dataset: Any) -> Any:
    """Return a dataset whose options are no longer the user's."""
    ray = require("ray", USER, extra="ray")
    return ray.get(ray.put(dataset))


def shared_dealer(dataset: Any, engine: Engine, *, asking: int) -> Any:
    """Return the handle of a dealer for all ranks, an actor beside the main one. A collective.

    Args:
        dataset: the main rank's is executed.
        engine: connects the ranks.
        asking: how many pieces each of them asks for at once.

    Raises:
        RuntimeError: this process is not connected to Ray.
    """
    ray = require("ray", USER, extra="ray")
    if not ray.is_initialized():
        raise RuntimeError(
            "This process is not connected to Ray, so it cannot read a Ray dataset: start the ranks by RayLauncher, or "
            "call ray.init(address=...) in each of them."
        )
    context, actor = ray.get_runtime_context(), None
    name = f"heliograph-{uuid4()}"
    if engine.is_main:
        warn_if_full()
        strategies = require("ray.util.scheduling_strategies", USER, extra="ray")
        here = strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "max_concurrency": asking * engine.world_size}
        kind = ray.remote(Dealer).options(scheduling_strategy=here, **options)
        actor = kind.remote(dataset, engine.world_size)
    name, namespace = engine.broadcast((name, context.namespace))
    return ray.get_actor(name, namespace) if actor is None else actor


def end_shared(dealer: Any) -> None:
    """End the actor at once, and with it what it executes; without its handles, it would first do all it was asked."""
    ray = require("ray", USER, extra="ray")
    if ray.is_initialized():
        ray.kill(dealer)


def warn_if_full() -> None:
    """Say so where a dataset will wait, since workers hold all CPUs."""
    if not require("ray", USER, extra="ray").available_resources().get("CPU", 0):
        logger.warning(
            "No CPU of the Ray cluster is free, so a Ray dataset waits until one is: give the workers fewer of them "
            "(resources_per_worker), or the cluster more."
        )
