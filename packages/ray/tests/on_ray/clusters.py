"""Several nodes on one machine. Nodes are added and removed in the main thread, so runs are called in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from time import time
from typing import Any

import ray
from ray.cluster_utils import Cluster

# When a killed node is considered dead: intervals in milliseconds, and the number of failed checks.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


@contextmanager
def several_nodes(number: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster of nodes with a CPU each, and its nodes without the first one, which is this process's."""
    cluster: Any = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": HEALTH}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(number - 1)]
        ray.init(address=cluster.address, log_to_driver=False)
        try:
            yield cluster, nodes
        finally:
            ray.shutdown()
    finally:
        cluster.shutdown()


def used_nodes() -> set[str]:
    """Return the ids of the nodes that workers are placed on."""
    groups = ray.util.placement_group_table().values()
    return {node for group in groups if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()}


def drain(address: str, node: str, remains: float = 100.0) -> None:
    """Announce that a node will be taken away, as a cloud's agent does.

    Args:
        address: of the cluster.
        node: its id.
        remains: seconds until then.
    """
    reason = vars(import_module("ray.core.generated.autoscaler_pb2"))["DrainNodeReason"]
    client = vars(import_module("ray._raylet"))["GcsClient"](address=address)
    preempted, deadline = reason.Value("DRAIN_NODE_REASON_PREEMPTION"), int((time() + remains) * 1000)
    is_accepted, why_not = client.drain_node(node, preempted, "its price rose", deadline)
    assert is_accepted, why_not


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread; return a future of its value."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  # raised by result()
            future.set_exception(error)

    Thread(target=call, daemon=True).start()
    return future
